import com.sun.management.OperatingSystemMXBean;
import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelConsumerOptions.CommitMode;
import io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.lang.management.ManagementFactory;
import java.util.List;
import java.util.Locale;
import java.util.Properties;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Parallel Consumer's `poll`, key by key, with a handler that sleeps or does nothing.
 *
 * <p>Arguments and the line that it prints: see `side_by_side.py`. All else has the library's defaults: offsets are
 * committed every 5 s.
 */
public class ConsumeRunner {
  private static final OperatingSystemMXBean SYSTEM =
      (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

  private static final AtomicLong begun = new AtomicLong(), handled = new AtomicLong();
  private static final CountDownLatch first = new CountDownLatch(1), last = new CountDownLatch(1);
  private static volatile long beginNanos, endNanos, cpuNanos;

  public static void main(String[] arguments) throws Exception {
    String topic = arguments[1];
    long count = Long.parseLong(arguments[2]);
    int threads = Integer.parseInt(arguments[3]);
    long sleepNanos = (long) (Double.parseDouble(arguments[4]) * 1e9);
    long limitMillis = (long) (Double.parseDouble(arguments[5]) * 1e3);

    Properties consuming = new Properties();
    consuming.put("bootstrap.servers", arguments[0]);
    consuming.put("group.id", UUID.randomUUID().toString());
    consuming.put("auto.offset.reset", "earliest");
    consuming.put("enable.auto.commit", "false");
    consuming.put("isolation.level", "read_committed");
    consuming.put("key.deserializer", ByteArrayDeserializer.class.getName());
    consuming.put("value.deserializer", ByteArrayDeserializer.class.getName());

    var options =
        ParallelConsumerOptions.<byte[], byte[]>builder()
            .ordering(ProcessingOrder.KEY)
            .maxConcurrency(threads)
            .commitMode(CommitMode.PERIODIC_CONSUMER_ASYNCHRONOUS)
            .consumer(new KafkaConsumer<byte[], byte[]>(consuming))
            .build();
    ParallelStreamProcessor<byte[], byte[]> processor =
        ParallelStreamProcessor.createEosStreamProcessor(options);
    processor.subscribe(List.of(topic));
    processor.poll(
        context -> {
          if (begun.incrementAndGet() == 1) {
            cpuNanos = SYSTEM.getProcessCpuTime();
            beginNanos = System.nanoTime();
            first.countDown();
          }
          if (sleepNanos > 0) {
            try {
              TimeUnit.NANOSECONDS.sleep(sleepNanos);
            } catch (InterruptedException stopped) {
              throw new RuntimeException(stopped);
            }
          }
          if (handled.incrementAndGet() == count) {
            endNanos = System.nanoTime();
            last.countDown();
          }
        });
    first.await(60, TimeUnit.SECONDS);
    if (!last.await(limitMillis, TimeUnit.MILLISECONDS)) {
      endNanos = System.nanoTime();
    }
    System.out.printf(
        Locale.ROOT,
        "{\"handled\": %d, \"seconds\": %.4f, \"cpu_s\": %.3f}%n",
        Math.min(count, handled.get()),
        (endNanos - beginNanos) / 1e9,
        (SYSTEM.getProcessCpuTime() - cpuNanos) / 1e9);
    System.out.flush();
    // The measurement is over: what is in flight is of no interest.
    Runtime.getRuntime().halt(0);
  }
}
