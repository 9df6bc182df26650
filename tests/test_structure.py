"""The shape of the code: imports point one way, and every file is short enough to be read at once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (  # highest first; a layer imports from those below it, and parts that share a layer nothing from each other
    {"__main__"},
    {"cli"},
    {"doctor"},
    {"verify", "bench", "server", "chat", "lab"},
    {"llm"},
    {"runner"},
    {"model", "sampling"},
    {"ops", "engine"},
    {"kv", "text"},
    {"threads", "outputs", "sampling_params"},
    {"arguments", "errors", "_lazy", "_warnings", "cgroup", "cpu_flags"},
)

MAX_LINES = 300  # of code: without docstrings, comments and blank lines

# What the server takes from below: the names of the engine's package, and what a request and its text are made of.
SERVER_MAY_IMPORT = {
    "minipaged",
    "minipaged.engine",
    "minipaged.errors",
    "minipaged.llm",
    "minipaged.text.chat_template",
    "minipaged.text.detokenizer",
    "minipaged.text.reasoning",
    "minipaged.text.tokenizer",
    "minipaged.text.tool_calls",
}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    """Every import in the package: those inside functions and those for type checkers alone as well."""
    return grimp.build_graph("minipaged", cache_dir=None)


def broken_layers(imports: grimp.ImportGraph, layers: tuple[set[str], ...]) -> list[str]:
    found = imports.find_illegal_dependencies_for_layers(layers=layers, containers={"minipaged"})
    return [
        " -> ".join([min(route.heads), *route.middle, min(route.tails)])
        for dependency in found
        for route in dependency.routes
    ]


def test_imports_point_one_way(imports: grimp.ImportGraph) -> None:
    assert broken_layers(imports, LAYERS) == []


def test_an_import_that_points_the_wrong_way_is_found(imports: grimp.ImportGraph) -> None:
    chains = broken_layers(imports, ({"errors"}, {"kv"}, {"ops"}))
    assert "minipaged.kv.block_manager -> minipaged.errors" in chains


def test_every_part_has_its_layer(imports: grimp.ImportGraph) -> None:
    parts = {module.removeprefix("minipaged.") for module in imports.find_children("minipaged")}
    assert parts - set().union(*LAYERS) == set(), "new parts of minipaged: say in LAYERS where they belong"


def test_no_module_imports_itself_through_others() -> None:
    """Names that only annotations need (`if TYPE_CHECKING`) may go in a circle inside a layer: nothing runs there."""
    graph = grimp.build_graph("minipaged", exclude_type_checking_imports=True, cache_dir=None)
    try:
        TopologicalSorter(
            {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
        ).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_the_server_imports_only_what_is_public(imports: grimp.ImportGraph) -> None:
    server = imports.find_descendants("minipaged.server") | {"minipaged.server"}
    taken = {
        (module, imported)
        for module in server
        for imported in imports.find_modules_directly_imported_by(module)
        if imported not in server | SERVER_MAY_IMPORT
    }
    assert taken == set()


def test_the_server_uses_no_private_name_of_the_engine() -> None:
    private = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in (ROOT / "src/minipaged/server").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os"))  # os._exit
    ]
    assert private == []


# ---- length


def python_lines(source: str) -> int:
    """Lines with code on them: strings that are statements (docstrings) count as comments do."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - texts)


def cpp_lines(source: str) -> int:
    """Lines with code on them. No string of ours holds the beginning of a comment."""
    without = re.sub(r"/\*.*?\*/|//[^\n]*", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL)
    return sum(not line.isspace() and line != "" for line in without.split("\n"))


def lines_of_code(path: Path) -> int:
    return (python_lines if path.suffix == ".py" else cpp_lines)(path.read_text(encoding="utf-8"))


PYTHON = '''"""Text
of a module."""

x = (  # why
    1
)

def f():
    """Text."""
    # why
    return """a
b"""
'''
CPP = """// text
#pragma once

int x;  // why
/* more
   text */ int y;
  /* text */
"""


def test_what_counts_as_a_line_of_code() -> None:
    assert python_lines(PYTHON) == 6
    assert cpp_lines(CPP) == 3


def test_no_file_is_too_long() -> None:
    patterns = ("src/**/*.py", "native/*.cpp", "native/*.h", "tools/**/*.py", "benchmarks/**/*.py", "tests/**/*.py")
    lengths = {
        path.relative_to(ROOT).as_posix(): lines_of_code(path) for pattern in patterns for path in ROOT.glob(pattern)
    }
    assert len(lengths) > 100
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert too_long == {}, f"more than {MAX_LINES} lines of code: split them"
