"""`python -m dml.describe`: the model of a configuration, without its data: stages, learners, parameters, flops.

One flop is one multiply-add; they are counted for one image of `image_size`. The last line is a JSON object with the
totals.
"""

from omegaconf import DictConfig

from dml.launch.entry import check_overlay, command


def task(config: DictConfig) -> None:
    check_overlay()
    from dml.training.description import print_description

    print_description(config)


main = command(task, sweeps=False)

if __name__ == "__main__":
    main()
