"""What happens in a run beside its steps, a callback each. `order.callbacks_of` lists them in the order by which a run
that was killed goes on exactly: a step's evaluation, the report of the last step, then the checkpoint."""
