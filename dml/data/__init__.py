"""Images in: records of a dataset, transforms, samplers, and the data module that serves batches."""
