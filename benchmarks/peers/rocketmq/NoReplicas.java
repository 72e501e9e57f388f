import org.apache.rocketmq.store.ha.DefaultHAService;

/**
 * In place of the service that waits for replicas of a broker, which would listen on all of the machine's addresses: a
 * broker without replicas needs none.
 */
public class NoReplicas extends DefaultHAService {
  @Override
  public void start() {}

  @Override
  public void shutdown() {}
}
