"""What `python -m dml.smoke` measures: parts that run in processes of their own, their figures, table and drawing."""
