"""What notebooks call: widgets, runs and players."""

from omni_lab.workbench.builder import AblationBuilder
from omni_lab.workbench.captures import open_traces
from omni_lab.workbench.dial import Dial
from omni_lab.workbench.explorer import LatencyExplorer
from omni_lab.workbench.live import LivePlayer
from omni_lab.workbench.loop import BackgroundLoop, background
from omni_lab.workbench.page import follow_theme
from omni_lab.workbench.player import AudioPlayer, Take, take_of, takes
from omni_lab.workbench.runs import RunJob, open_run
from omni_lab.workbench.servers import attach, serving
from omni_lab.workbench.tables import table
from omni_lab.workbench.trace_view import TraceView

__all__ = [
    "AblationBuilder",
    "AudioPlayer",
    "BackgroundLoop",
    "Dial",
    "LatencyExplorer",
    "LivePlayer",
    "RunJob",
    "Take",
    "TraceView",
    "attach",
    "background",
    "follow_theme",
    "open_run",
    "open_traces",
    "serving",
    "table",
    "take_of",
    "takes",
]
