"""Which values of a configuration are paths of the machine, and so are not shared, and what else is not."""

import re

from dml.hub import is_address

PLACES = ("root", "csv", "weights_dir")  # options that are paths, even if they do not look like one


def without_secrets(address: str) -> str:
    """Returns an address without what may be secret: the user with the password, the query and the fragment."""
    scheme, slashes, rest = re.split("[?#]", address)[0].partition("://")
    host, slash, path = rest.partition("/")
    return scheme + slashes + host.rpartition("@")[2] + slash + path


def holds_path(option: str, value: str) -> bool:
    """Returns whether a value is a path of this machine, by its looks or as the value of an option of this name."""
    if value.startswith(("/", "~", "./", "../", "file:")):
        return True
    if option == "weights":  # of a backbone
        return value not in ("imagenet", "none") and not is_address(value)
    return option in PLACES
