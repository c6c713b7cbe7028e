"""Pictures of a run: figures, the offline report, and the template that they share."""
