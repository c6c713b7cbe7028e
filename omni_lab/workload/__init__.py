"""What is asked of a pipeline, when, and by whom: data sets, arrivals, clients."""
