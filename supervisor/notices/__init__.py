"""Where preemption notices come from: one file a source, and the watcher that never dies."""
