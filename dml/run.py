"""`python -m dml.run`: compose the configuration, train, evaluate, report."""

from dml.launch.entry import command
from dml.launch.run import task

main = command(task)

if __name__ == "__main__":
    main()
