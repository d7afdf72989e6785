"""Self-contained HTML pages from the templates beside this file."""

from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """Renders a page. A value that the template uses and that is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dml.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
