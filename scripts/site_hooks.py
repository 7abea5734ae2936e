"""What MkDocs calls while it builds the site: generated pages, formulas, links that lead out of docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import site_reference

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#\s]+)[^)]*\)")


def on_files(files, config):
    """Add the pages that are made from the package's own tables and parsers."""
    from mkdocs.structure.files import File

    for path, text in site_reference.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """The site has no page for files outside of docs/: their links become text.

    Raises:
        FileNotFoundError: Such a link leads nowhere.
    """
    if "/" in page.file.src_uri:
        return markdown

    def plain(match: re.Match) -> str:
        if not (ROOT / match["path"]).exists():
            raise FileNotFoundError(
                f"docs/{page.file.src_uri} links to ../{match['path']}, which is not there"
            )
        return match["text"]

    return OUTSIDE.sub(plain, markdown)


ROLE = re.compile(r":(?:class|func|mod|data|meth|attr):<code>~?(?:[\w.]+\.)?(?P<name>\w+)</code>")


def on_page_content(html, page, config, files):
    """References in docstrings have the form that Sphinx reads; the site shows the name they refer to."""
    return ROLE.sub(r"<code>\g<name></code>", html)


def formula(source, language, css_class, options, md, **kwargs):
    """A fence of LaTeX as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    rows = [convert(row, display="block") for row in source.split("\n\n") if row.strip()]
    return f'<div class="{css_class}">{"".join(rows)}</div>'
