"""All experiments with what was recorded for them, read once for the tests of several files."""

from dml.papers.catalogue import find

EXPERIMENTS = {one.name: one for one in find(["all"])}
