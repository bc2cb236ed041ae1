"""Rules about source text, as functions from text to faults; `test_architecture.py` applies and proves them.

A fault is one line, "what is wrong (line N)". Nothing here imports what it looks at.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "FACADES",
    "LAYERS",
    "Layer",
    "architecture_names",
    "environment_reads",
    "import_faults",
    "layer_of",
    "literal_tolerances",
    "long_functions",
    "pickles",
    "unexplained_skips",
]


# Imports


@dataclass(frozen=True)
class Layer:
    """What modules of a layer may import.

    duomesh: modules of ours, each with everything below it. packages: others, at module level. deferred: others,
    only where importing the module does not run them. The standard library is free.
    """

    duomesh: tuple[str, ...]
    packages: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()


_ARRAYS = ("numpy", "ml_dtypes")
_LIBRARY = ("duomesh.core", "duomesh.kernels", "duomesh.converters", "duomesh.backends")

# What a user imports: the only modules beside `cli` that know both converters and backends.
FACADES = ("duomesh", "duomesh.api", "duomesh.sides", "duomesh.spec")

# Longest name first decides. A facade is one module; a package is everything below it.
LAYERS: dict[str, Layer] = {
    "duomesh.core": Layer(("duomesh.core",), _ARRAYS, ("rich", "jinja2", "tokenizers")),
    "duomesh.kernels": Layer(("duomesh.core", "duomesh.kernels"), _ARRAYS),
    "duomesh.backends": Layer(()),
    "duomesh.backends.torch": Layer(
        ("duomesh.core", "duomesh.kernels", "duomesh.backends.torch"), (*_ARRAYS, "torch", "einops")
    ),
    "duomesh.backends.jax": Layer(
        ("duomesh.core", "duomesh.kernels", "duomesh.backends.jax"), (*_ARRAYS, "jax", "flax", "optax", "einops")
    ),
    "duomesh.converters": Layer(("duomesh.core", "duomesh.converters"), _ARRAYS),
    # one side of a comparison: transformers itself
    "duomesh.converters.hf.oracle": Layer(
        ("duomesh.core", "duomesh.converters"), _ARRAYS, deferred=("torch", "transformers")
    ),
    **{name: Layer((*_LIBRARY, *FACADES), _ARRAYS) for name in FACADES},
    "duomesh.cli": Layer((*_LIBRARY, *FACADES, "duomesh.cli"), ("numpy", "rich", "tyro")),
    # tells which frameworks there are
    "duomesh.cli.env": Layer((*_LIBRARY, *FACADES), ("rich",), deferred=("torch", "jax")),
}

# Where a module is imported by a name that is not written in the source: the command's own module.
_DYNAMIC = ("duomesh.cli.main",)


@dataclass(frozen=True)
class _Import:
    """One imported name: a module, or something within one. `module` is dotted and absolute."""

    module: str
    line: int
    is_deferred: bool


def layer_of(module: str) -> str | None:
    """The key of `LAYERS` that a module belongs to."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((n for n in names if n in LAYERS and (n == module or n not in FACADES)), None)


def _imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[_Import]:
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, is_deferred: bool) -> Iterator[_Import]:
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, node.lineno, is_deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            yield from (_Import(f"{base}.{alias.name}", node.lineno, is_deferred) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            named = node.args[0] if node.args else None
            name = named.value if isinstance(named, ast.Constant) else "?"
            yield _Import(str(name), node.lineno, is_deferred)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inside |= isinstance(node, ast.If) and _dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_deferred or inside)

    return visit(tree, False)


def _called(node: ast.Call) -> str:
    """The last word of what is called: `c` in a.b.c(...)."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_allowed(name: str, module: str) -> bool:
    """Whether importing `name` stays within an allowed module. A facade allows itself and its names, no submodule."""
    if module in FACADES:
        return name == module or (name.rpartition(".")[0] == module and layer_of(name) is None)
    return name == module or name.startswith(module + ".")


def import_faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Imports that go against the arrows cli -> api -> converters, backends -> kernels -> core, and foreign ones."""
    key = layer_of(module)
    if key is None:
        return [f"{module} belongs to no layer; add it to LAYERS"]
    layer, out = LAYERS[key], []
    for found in _imports(ast.parse(source), module, is_package=is_package):
        name, top = found.module, found.module.partition(".")[0]
        if name == "?":
            if module not in _DYNAMIC:
                out.append(f"{module} imports a module by a computed name (line {found.line})")
        elif top == "duomesh":
            # `from duomesh import x` means the module x if there is one, else a name of the facade
            if not any(_is_allowed(name, allowed) for allowed in layer.duomesh):
                out.append(f"{module} must not import {name} (line {found.line})")
        elif top in layer.deferred:
            if not found.is_deferred:
                out.append(f"{module} imports {top} outside of a function (line {found.line})")
        elif top not in sys.stdlib_module_names and top not in layer.packages:
            out.append(f"{module} must not import {top} (line {found.line})")
    return out


# Sizes


def long_functions(source: str, limit: int) -> list[str]:
    """Functions of more than `limit` lines, signature included and docstring left out."""
    out = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                assert first.end_lineno is not None
                length -= first.end_lineno - first.lineno + 1
            if length > limit:
                out.append(f"{node.name} has {length} lines (line {node.lineno})")
    return out


# Names of architectures


def architecture_names(text: str, names: tuple[str, ...]) -> list[str]:
    """Lines, comments and docstrings included, that speak of an architecture. Digits after a name do not hide it."""
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(names)})(?![a-z])", re.IGNORECASE)
    return [
        f"{match[0]!r} (line {number})"
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
    ]


# Tolerances

_WITH_TOLERANCE = frozenset({"approx", "allclose", "isclose", "assert_allclose", "assert_close"})
_WITH_DECIMALS = frozenset(
    {"assert_almost_equal", "assertAlmostEqual", "assert_array_almost_equal", "assert_approx_equal"}
)
_TOLERANCES = frozenset({"atol", "rtol", "abs", "rel", "abs_tol", "rel_tol", "tol", "tolerance"})
_BOUNDS = frozenset({"bound", "rounding"})
_SMALL = 0.1  # a number below it in a comparison is taken for a tolerance
_TRANSPARENT = frozenset({"abs", "float", "max", "min", "sqrt"})


def literal_tolerances(source: str) -> list[str]:
    """Comparisons in a test whose closeness is a number of their own instead of one from a bound.

    Found are: small literals in an order comparison; a bound multiplied by a literal; `approx`, `isclose` and the
    like with a literal, or with their default tolerance. A tolerance of literal 0 asks for equality and is fine.
    """
    out = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops):
            terms = [term for side in (node.left, *node.comparators) for term in _terms(side)]
            out += [f"{ast.unparse(term)} in a comparison (line {node.lineno})" for term in terms if _is_small(term)]
            stretched = [term for term in terms if _is_stretched(term)]
            out += [f"{ast.unparse(term)} stretches a bound (line {node.lineno})" for term in stretched]
        elif isinstance(node, ast.Call) and _called(node) in _WITH_DECIMALS:
            out.append(f"{_called(node)} has a tolerance of its own (line {node.lineno})")
        elif isinstance(node, ast.Call) and _called(node) in _WITH_TOLERANCE:
            given = [word.value for word in node.keywords if word.arg in _TOLERANCES]
            if not given:
                out.append(f"{_called(node)} with its default tolerance (line {node.lineno})")
            out += [f"{_called(node)} with {ast.unparse(v)} (line {node.lineno})" for v in given if _has_number(v)]
    return out


def _terms(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an arithmetic expression; calls are opaque but for those that pass a size through."""
    yield node
    children: list[ast.AST] = []
    if isinstance(node, ast.BinOp):
        children = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        children = [node.operand]
    elif isinstance(node, ast.IfExp):
        children = [node.body, node.orelse]
    elif isinstance(node, ast.Call) and _called(node) in _TRANSPARENT:
        children = list(node.args)
    for child in children:
        yield from _terms(child)


def _is_small(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < abs(node.value) < _SMALL


def _is_stretched(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    pairs = ((node.left, node.right), (node.right, node.left))
    return any(_is_number(a) and isinstance(b, ast.Call) and _called(b) in _BOUNDS for a, b in pairs)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value != 0


def _has_number(node: ast.AST) -> bool:
    return any(_is_number(term) for term in _terms(node))


# Things that a library does not do

_PICKLES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})


def environment_reads(source: str) -> list[str]:
    """Uses of os.environ, os.getenv and the like."""
    tree = ast.parse(source)
    words = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    uses = [(n.attr, n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _dotted(n.value) == "os"]
    uses += [
        (alias.name, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
    ]
    return [f"os.{word} (line {line})" for word, line in uses if word in words]


def pickles(source: str) -> list[str]:
    """Whatever can run code while it reads data: pickle and its kin, torch.load, numpy.load."""
    out = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            out += [f"import of {name} (line {node.lineno})" for name in names if name.partition(".")[0] in _PICKLES]
        elif (
            isinstance(node, ast.Attribute) and node.attr == "load" and _dotted(node.value) in ("torch", "np", "numpy")
        ):
            out.append(f"{_dotted(node.value)}.load (line {node.lineno})")
    return out


def _dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


# Skips


def unexplained_skips(source: str) -> list[str]:
    """Skips and expected failures of pytest without a reason."""
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    out = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        name, call = _dotted(node), called.get(id(node))
        if name in ("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"):
            explained = call is not None and _says(call, position=0 if name.endswith(".skip") else None)
        elif name in ("pytest.skip", "pytest.xfail"):
            explained = call is not None and _says(call, position=0)
        elif name == "pytest.importorskip":
            explained = call is not None and _says(call, position=None)
        else:
            continue
        if not explained:
            out.append(f"{name} without a reason (line {node.lineno})")
    return out


def _says(call: ast.Call, *, position: int | None) -> bool:
    """Whether a call has a reason: the keyword, or the argument at a position."""
    reasons = [word.value for word in call.keywords if word.arg == "reason"]
    if position is not None:
        reasons += call.args[position : position + 1]
    return any(not (isinstance(r, ast.Constant) and not r.value) for r in reasons)
