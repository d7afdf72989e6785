"""What happens in a run beside its steps, a callback each; `course.callbacks_of` lists them in the order that makes a
run exact that is killed anywhere: a step's evaluation, the report of the last step, then the checkpoint."""
