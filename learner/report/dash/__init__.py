"""The live page: reads run folders alone, so that it never disturbs a run."""
