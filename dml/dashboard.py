"""`python -m dml.dashboard --project P`: a W&B workspace with the panels that compare methods.

Runs are shown by group: those that differ in their repetition alone are one line with its standard deviation. With no
key at hand, or with --print, the workspace is built and checked, and its definition printed.
"""

import argparse
import json

from dml.errors import UserError, stop
from dml.launch.entry import ending
from dml.reporting.dashboard import definition, workspace


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dml.dashboard", description=__doc__)
    parser.add_argument("--project", required=True, help="W&B project, as in logger.wandb.project")
    parser.add_argument("--entity", help="user or team; default: yours")
    parser.add_argument("--name", default="Methods compared", help="of the workspace")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the definition, send nothing")
    options = parser.parse_args()
    for name in ("project", "name"):
        if not getattr(options, name).strip():
            raise UserError(f"--{name} is empty: name one.")
    if wrong := set(options.project) & set("/\\#?%:"):
        raise UserError(f"--project {options.project} holds {' '.join(sorted(wrong))}, which W&B takes in no project.")
    import wandb

    try:
        if options.only_print or not wandb.login(prompt=False):
            print(
                json.dumps(definition(workspace(options.project, options.entity or "entity", options.name)), indent=1)
            )
            return
        entity = options.entity or str(wandb.Api().default_entity)
        saved = workspace(options.project, entity, options.name).save()
    except Exception as error:  # of whatever layer of theirs could not reach the service
        said = (str(error).splitlines() or [type(error).__name__])[0]
        stop(f"W&B did not take the workspace ({said}): --print shows what would be sent.")
    print(saved.url)


if __name__ == "__main__":
    main()
