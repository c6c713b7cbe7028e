"""omni_lab: a workbench for multi-stage omni-modal serving."""

from omni_lab.frames import load

__all__ = ["load"]
