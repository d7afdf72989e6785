"""The callbacks of a run, for all that happens beside its steps.

`order.callbacks_of` lists them in the order that lets a killed run be continued exactly: a step's evaluation, the
report after the last step, then the checkpoint.
"""
