import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Locale;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLongArray;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * RocketMQ's transactional sends from so many threads, each committed at once, as a consumer in this process sees them.
 *
 * <p>Arguments: NAME_SERVER TOPIC THREADS SECONDS SIZE. It runs warm for 3 s first. The rate is what was sent in the
 * seconds after that by the time until the last of it was visible; a latency runs from before the send to the
 * consumer's hands. It prints one line of JSON.
 */
public class TransactionRunner {
  private static final int MOST = 8_000_000, QUEUES = 8;
  private static final long WARM_UP_NANOS = 3_000_000_000L, STILL_NANOS = 20_000_000_000L;

  /** When each message was sent and when it was first seen, by number; 0 while it was not. */
  private static final AtomicLongArray sent = new AtomicLongArray(MOST), seen = new AtomicLongArray(MOST);

  private static final AtomicInteger numbers = new AtomicInteger(), visible = new AtomicInteger();

  public static void main(String[] arguments) throws Exception {
    String server = arguments[0], topic = arguments[1];
    int threads = Integer.parseInt(arguments[2]), size = Integer.parseInt(arguments[4]);
    long nanos = (long) (Double.parseDouble(arguments[3]) * 1e9);
    create(server, topic);
    consume(server, topic);
    TransactionMQProducer producer = producer(server, topic);

    long from = System.nanoTime() + WARM_UP_NANOS, to = from + nanos;
    Thread[] senders = new Thread[threads];
    for (int me = 0; me < threads; me++) {
      senders[me] = new Thread(() -> send(producer, topic, size, to));
      senders[me].start();
    }
    for (Thread sender : senders) {
      sender.join();
    }
    int count = numbers.get();
    awaitVisible(count);
    report(count, from);
    Runtime.getRuntime().halt(0);
  }

  private static void create(String server, String topic) throws Exception {
    DefaultMQAdminExt admin = new DefaultMQAdminExt();
    admin.setNamesrvAddr(server);
    admin.start();
    // A server that was just started knows its brokers a little later.
    for (int attempt = 0; ; attempt++) {
      try {
        for (var broker : admin.examineBrokerClusterInfo().getBrokerAddrTable().values()) {
          admin.createAndUpdateTopicConfig(broker.getBrokerAddrs().get(0L), new TopicConfig(topic, QUEUES, QUEUES));
        }
        if (!admin.examineTopicRouteInfo(topic).getQueueDatas().isEmpty()) {
          break;
        }
      } catch (Exception notYet) {
        if (attempt == 120) {
          throw notYet;
        }
      }
      Thread.sleep(250);
    }
    admin.shutdown();
  }

  private static void consume(String server, String topic) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("consumer-" + topic);
    consumer.setNamesrvAddr(server);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.setPullBatchSize(256);
    consumer.setConsumeMessageBatchMaxSize(32);
    consumer.subscribe(topic, "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              long now = System.nanoTime();
              for (MessageExt message : messages) {
                if (seen.compareAndSet(ByteBuffer.wrap(message.getBody()).getInt(), 0, now)) {
                  visible.incrementAndGet();
                }
              }
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
  }

  private static TransactionMQProducer producer(String server, String topic) throws Exception {
    TransactionMQProducer producer = new TransactionMQProducer("producer-" + topic);
    producer.setTransactionListener(
        new TransactionListener() {
          @Override
          public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return LocalTransactionState.COMMIT_MESSAGE;
          }

          @Override
          public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
          }
        });
    producer.setNamesrvAddr(server);
    producer.setSendMsgTimeout(10_000);
    producer.start();
    return producer;
  }

  private static void send(TransactionMQProducer producer, String topic, int size, long until) {
    while (System.nanoTime() < until) {
      int number = numbers.getAndIncrement();
      byte[] body = new byte[size];
      ByteBuffer.wrap(body).putInt(number);
      sent.set(number, System.nanoTime());
      try {
        producer.sendMessageInTransaction(new Message(topic, "", "k" + number % 10_000, body), null);
      } catch (Exception failed) {
        throw new RuntimeException(failed);
      }
    }
  }

  private static void awaitVisible(int count) throws InterruptedException {
    int before = -1;
    long changed = System.nanoTime();
    while (visible.get() < count && System.nanoTime() - changed < STILL_NANOS) {
      if (visible.get() != before) {
        before = visible.get();
        changed = System.nanoTime();
      }
      Thread.sleep(10);
    }
  }

  private static void report(int count, long from) {
    long[] waits = new long[count];
    int measured = 0;
    long last = from + 1;
    for (int number = 0; number < count; number++) {
      if (sent.get(number) >= from && seen.get(number) > 0) {
        waits[measured++] = seen.get(number) - sent.get(number);
        last = Math.max(last, seen.get(number));
      }
    }
    long[] sorted = Arrays.copyOf(waits, measured);
    Arrays.sort(sorted);
    System.out.printf(
        Locale.ROOT,
        "{\"rate\": %.1f, \"p50\": %.3f, \"p99\": %.3f, \"missing\": %d}%n",
        measured * 1e9 / (last - from),
        measured == 0 ? 0 : sorted[measured / 2] / 1e6,
        measured == 0 ? 0 : sorted[measured * 99 / 100] / 1e6,
        count - visible.get());
    System.out.flush();
  }
}
