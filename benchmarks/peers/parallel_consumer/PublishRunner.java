import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelConsumerOptions.CommitMode;
import io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Parallel Consumer's `pollAndProduce` from one topic into another, key by key, until standard input ends.
 *
 * <p>Arguments: asynchronous|transactional SERVERS SOURCE TARGET GROUP THREADS HANDLER_SECONDS. All else has the
 * library's defaults: offsets are committed every 5 s, or with the transaction every 100 ms.
 */
public class PublishRunner {
  public static void main(String[] arguments) throws Exception {
    boolean transactional = arguments[0].equals("transactional");
    String source = arguments[2], target = arguments[3], group = arguments[4];
    int threads = Integer.parseInt(arguments[5]);
    long nanos = (long) (Double.parseDouble(arguments[6]) * 1e9);

    Properties consuming = new Properties();
    consuming.put("bootstrap.servers", arguments[1]);
    consuming.put("group.id", group);
    consuming.put("auto.offset.reset", "earliest");
    consuming.put("enable.auto.commit", "false");
    consuming.put("isolation.level", "read_committed");
    consuming.put("key.deserializer", ByteArrayDeserializer.class.getName());
    consuming.put("value.deserializer", ByteArrayDeserializer.class.getName());

    Properties producing = new Properties();
    producing.put("bootstrap.servers", arguments[1]);
    producing.put("acks", "all");
    producing.put("enable.idempotence", "true");
    producing.put("key.serializer", ByteArraySerializer.class.getName());
    producing.put("value.serializer", ByteArraySerializer.class.getName());
    if (transactional) {
      producing.put("transactional.id", group);
    }

    var options =
        ParallelConsumerOptions.<byte[], byte[]>builder()
            .ordering(ProcessingOrder.KEY)
            .maxConcurrency(threads)
            .commitMode(
                transactional
                    ? CommitMode.PERIODIC_TRANSACTIONAL_PRODUCER
                    : CommitMode.PERIODIC_CONSUMER_ASYNCHRONOUS)
            .consumer(new KafkaConsumer<byte[], byte[]>(consuming))
            .producer(new KafkaProducer<byte[], byte[]>(producing))
            .build();
    ParallelStreamProcessor<byte[], byte[]> processor =
        ParallelStreamProcessor.createEosStreamProcessor(options);
    processor.subscribe(List.of(source));
    processor.pollAndProduce(
        context -> {
          if (nanos > 0) {
            try {
              TimeUnit.NANOSECONDS.sleep(nanos);
            } catch (InterruptedException stopped) {
              throw new RuntimeException(stopped);
            }
          }
          return new ProducerRecord<>(target, context.key(), context.value());
        });
    while (System.in.read() >= 0) {}
    processor.closeDontDrainFirst();
    System.exit(0);
  }
}
