"""Stands in for torchvision, which does not import beside the CPU build of torch."""

from absent_modules import stand_in

stand_in(__name__)
