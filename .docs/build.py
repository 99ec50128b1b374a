"""Builds the HTML manual: `python .docs/build.py FOLDER` (`nox -s docs`).

pdoc makes one page for each module: those with public names, and those of a package `manual` that is written here, one module for each
page of `ddp-losses explain`. So every fault, host, peer and reader has a page with a stable address, such as `manual/faults/F24.html`.
Faults, commands and public names in these texts become links.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from lightning_ddp_losses.cli import manual, search
from lightning_ddp_losses.core.faults import FAULTS, SYMPTOMS

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
START = "manual"
# code and links, in which nothing is linked unless the code is a fault or a public name, and faults in plain text
_PIECE = re.compile(r"```.*?```|\[[^\]]*\]\([^)]*\)|<[^>]+>|`(?P<code>[^`]+)`|\b(?P<fault>F\d\d)\b", re.DOTALL)
# a line of a list of commands: on a page the text is the link
_COMMAND_LINE = re.compile(r"^\* `ddp-losses explain ([^`]+)`: (.+)$", re.MULTILINE)


def page_texts() -> dict[str, str]:
    """Return the Markdown of each page by its module."""
    texts = {f"{START}.faults.{fault}": fault_text(fault) for fault in FAULTS}
    texts |= {f"{START}.recipes.{name}": text for name, text in manual.recipes().items()}
    texts |= {f"{START}.readers.{name}": text for name, text in manual.readers().items()}
    texts |= {f"{START}.{name}": text for name, text in manual.about().items()}
    # the indexes
    faults = manual.fault_list()
    for key, heading in SYMPTOMS.items():
        faults = faults.replace(f"\n## {heading}\n", f'\n<a id="{key}"></a>\n\n## {heading}\n')
    texts[f"{START}.faults"] = faults
    texts[f"{START}.recipes"] = manual.recipe_list()
    texts[f"{START}.readers"] = manual.reader_list()
    texts[f"{START}.numbers"] = numbers()
    texts[START] = start_page()
    return texts


def start_page() -> str:
    """Return the overview, with the numbers and the modules of public names, which a terminal does not have."""
    text = manual.overview().partition("\nAny other words")[0]
    text += "* [Numbers](manual/numbers.html): time and memory, next to other packages\n\n## Where are the public names?\n\n"
    for place in manual.PLACES:
        summary = (importlib.import_module(place).__doc__ or "").partition("\n")[0]
        text += f"* `{place}`: {summary}\n"  # pdoc makes a link of it
    return text


def numbers() -> str:
    """Return the figures of the benchmarks. Their pictures are copied: pdoc would write those that it finds into the search, too."""
    return re.sub(r"\]\(results/([\w./]+\.png)\)", r"](pictures/\1)", (BENCHMARKS / "README.md").read_text())


def fault_text(fault: str) -> str:
    """Return the page of a fault, with a link to the other faults that show in the same way."""
    key = FAULTS[fault].seen_as
    return manual.fault_page(fault).replace(f" {SYMPTOMS[key]}.*", f" [{SYMPTOMS[key]}](../faults.html#{key}).*", 1)


def addresses(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the address of each topic of `ddp-losses explain` from the top of the site."""
    found = {module.rpartition(".")[2]: f"{module.replace('.', '/')}.html" for module in texts}
    found |= {f"migrate {name}": found[name] for name in manual.recipes()}
    found |= {"migrate": found["recipes"], "--all": found["faults"]}
    found |= {key: f"{found['faults']}#{key}" for key in SYMPTOMS}
    return found


def name_addresses() -> dict[str, str]:
    """Return the address of each public name, and of each fault."""
    found = {fault: f"{START}/faults/{fault}.html" for fault in FAULTS}
    for dotted in manual.public_names():
        module, _, name = dotted.rpartition(".")
        found.setdefault(name, f"{module.replace('.', '/')}.html#{name}")
    return found


def with_links(text: str, module: str, topics: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return a page with links to the faults, commands and names that it mentions, but not to itself.

    Args:
        text: Markdown of the page.
        module: Module of the page.
        topics: Addresses of topics.
        names: Addresses of names and faults.
    """
    own = f"{module.replace('.', '/')}.html"

    def link(shown: str, address: str | None) -> str:
        if address is None or address == own:
            return shown
        return f"[{shown}]({os.path.relpath(address, os.path.dirname(own))})"

    def link_line(line: re.Match[str]) -> str:
        title = line[2][:1].upper() + line[2][1:] if module == START else line[2]
        return f"* {link(title, topics.get(line[1], names.get(line[1])))}"

    def link_piece(piece: re.Match[str]) -> str:
        code = " ".join((piece["code"] or "").split())
        command = re.fullmatch(r"(?:ddp-losses )?explain (.+)", code)
        if command:
            return link(piece[0], topics.get(command[1], names.get(command[1])))
        if module == f"{START}.numbers" and code:  # names of benchmarks are also names of functions
            return piece[0]
        return link(piece[0], names.get(piece["fault"] or code))

    return _PIECE.sub(link_piece, _COMMAND_LINE.sub(link_line, text))


def write_modules(folder: Path) -> list[str]:
    """Write the package `manual`, one module for each page, and return the names of the modules."""
    texts = page_texts()
    topics, names = addresses(texts), name_addresses()
    for module, text in texts.items():
        path = folder / module.replace(".", "/")
        is_package = any(other.startswith(f"{module}.") for other in texts)
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        linked = with_links(text, module, topics, names)
        file.write_text(f'__docformat__ = "markdown"\n__doc__ = {linked!r}\n')
    return list(texts)


def complete_namespaces() -> None:
    """Define the names of all annotations in the modules of public names.

    A public name says that it is of the module where users import it. There pdoc evaluates its annotations, which use the imports of the
    module that defines it, also those that only a type checker runs.
    """
    names: dict[str, object] = {}
    for found in pkgutil.walk_packages([str(HERE.parent / manual.PACKAGE)], f"{manual.PACKAGE}."):
        # programs, and modules that need other libraries
        if found.name.endswith(".__main__") or ".integrations" in found.name or ".kernels" in found.name:
            continue
        module = importlib.import_module(found.name)
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                exec(ast.unparse(ast.Module(node.body, [])), vars(module))
        names = vars(module) | names
    for place in manual.PLACES:
        public = vars(importlib.import_module(place))
        # pdoc lists what is in a module without `__all__`
        if "__all__" in public:
            public.update({name: value for name, value in names.items() if name not in public})


def indexed_pages() -> list[dict[str, str]]:
    """Return the pages that `ddp-losses explain` searches, as pdoc's list of results shows them."""
    topics = name_addresses() | addresses(page_texts())
    found = []
    for page in manual.searched_pages():
        path, _, anchor = topics[page.topic].partition("#")
        shown = {
            "fullname": page.topic,
            "modulename": path.removesuffix(".html").replace("/", "."),
            "qualname": anchor,
            "kind": "page",
            "doc": html.escape(manual.title_of_topic(page.topic)),
        }
        found.append(shown | {column: getattr(page, column) for column in search.WEIGHTS})
    return found


def write_short_addresses(site: Path) -> None:
    """Write `explain/TOPIC.html` for each topic of one word. Errors name this address; it leads to the page."""
    folder = site / "explain"
    folder.mkdir(exist_ok=True)
    topics = name_addresses() | addresses(page_texts())
    for topic, address in topics.items():
        if re.fullmatch(r"\w+", topic):
            link = f"../{address}"
            refresh = f'<meta http-equiv="refresh" content="0; url={link}">'
            page = f'<!doctype html>\n<title>{topic}</title>\n{refresh}\n<a href="{link}">{topic}</a>\n'
            (folder / f"{topic}.html").write_text(page)


def main() -> None:
    """Build the manual into the folder that the command line names."""
    import pdoc

    site = Path(sys.argv[1])
    pdoc.render.configure(docformat="google", show_source=False, template_directory=HERE / "templates")
    with tempfile.TemporaryDirectory() as folder:
        write_modules(Path(folder))
        sys.path.insert(0, folder)
        complete_namespaces()
        # the package brings `audit`, which is a public name too
        places = [place for place in manual.PLACES if place != f"{manual.PACKAGE}.audit"]
        warnings.filterwarnings("error", module="pdoc")
        # pdoc assumes the class that it documents, which is right
        warnings.filterwarnings("ignore", "Cannot determine where .* is taken from")
        # a NamedTuple's constructor does not name its module
        warnings.filterwarnings("ignore", r"Error parsing type annotation ForwardRef\('Tensor'\) for .*\.Moments\.")
        names = {"searched_pages": json.dumps(indexed_pages()), "search_weights": json.dumps(search.WEIGHTS)}
        pdoc.render.env.globals.update(names)
        pdoc.pdoc(START, *places, output_directory=site)
    write_short_addresses(site)
    pictures = site / START / "pictures"
    pictures.mkdir(exist_ok=True)
    for picture in (BENCHMARKS / "results").glob("*.png"):
        shutil.copy(picture, pictures)


if __name__ == "__main__":
    main()
