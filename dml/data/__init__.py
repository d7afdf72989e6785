"""From files to batches: the records of each dataset, transforms, samplers, caches, and the data module."""
