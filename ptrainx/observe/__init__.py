"""Looking at a run: metrics on disk, progress on the terminal, the loss as a picture."""

from ptrainx.observe.memory import rss_mib
from ptrainx.observe.metrics import MetricsWriter, read_metrics
from ptrainx.observe.plot import plot_loss
from ptrainx.observe.progress import Progress

__all__ = ["MetricsWriter", "Progress", "plot_loss", "read_metrics", "rss_mib"]
