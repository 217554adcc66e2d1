"""The lastgasp daemon: watches for preemption, makes checkpoints durable, relaunches the job."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)
