"""The house rules that no other test would notice: arrows between packages, sizes, names, tolerances, skips.

Each rule is proved below its use by snippets that break it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from source_rules import (
    architecture_names,
    environment_reads,
    import_faults,
    literal_tolerances,
    long_functions,
    pickles,
    unexplained_skips,
)

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "duomesh").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ALL = [*LIBRARY, *TESTS, *sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]


def module_of(path: Path) -> tuple[str, bool]:
    """(dotted name, whether it is a package)."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Imports


def test_imports_follow_the_arrows() -> None:
    faults = []
    for path in LIBRARY:
        module, is_package = module_of(path)
        faults += import_faults(path.read_text("utf-8"), module, is_package=is_package)
    assert len(LIBRARY) > 60 and not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("duomesh.core.x", "import torch"),
        ("duomesh.core.x", "def f():\n    import torch.nn as nn"),
        ("duomesh.core.x", "class A:\n    def f(self):\n        from jax import numpy"),
        ("duomesh.core.x", "import rich"),
        ("duomesh.core.x", "import einops"),
        ("duomesh.core.x", "from duomesh.kernels import reference"),
        ("duomesh.core.x", "from duomesh import api"),
        ("duomesh.core.x", "from duomesh.api import build"),
        ("duomesh.core.x", "import duomesh"),
        ("duomesh.core.x", "from ..api import build"),
        ("duomesh.core.x", "from .. import sides"),
        ("duomesh.core.x", "if TYPE_CHECKING:\n    from duomesh.backends.torch.session import TorchSession"),
        ("duomesh.core.x", "import importlib\nimportlib.import_module('torch')"),
        ("duomesh.core.x", "from importlib import import_module\nimport_module(name)"),
        ("duomesh.core.x", "__import__('jax')"),
        ("duomesh.kernels.reference.x", "import torch"),
        ("duomesh.kernels.reference.x", "from duomesh.backends.torch import ops"),
        ("duomesh.kernels.reference.x", "from duomesh.converters import pairing"),
        ("duomesh.backends.torch.x", "import jax.numpy as jnp"),
        ("duomesh.backends.torch.x", "from duomesh.backends.jax import ops"),
        ("duomesh.backends.torch.x", "from duomesh.backends import jax"),
        ("duomesh.backends.torch.x", "from ..jax.ops import OPS"),
        ("duomesh.backends.torch.x", "from duomesh.converters.hf import export_hf"),
        ("duomesh.backends.torch.x", "from duomesh.sides import verify"),
        ("duomesh.backends.jax.x", "import torch"),
        ("duomesh.backends.jax.x", "def f():\n    from duomesh.backends.torch.arrays import to_array"),
        ("duomesh.backends.x", "import torch"),
        ("duomesh.converters.hf.x", "def f():\n    import transformers"),
        ("duomesh.converters.hf.x", "from duomesh.backends.torch.session import TorchSession"),
        ("duomesh.converters.hf.x", "from duomesh.api import open_model"),
        ("duomesh.converters.hf.oracle", "import torch"),
        ("duomesh.converters.hf.oracle", "def f():\n    import jax"),
        ("duomesh.api", "import torch"),
        ("duomesh.api", "def f():\n    import jax"),
        ("duomesh.api", "from duomesh.cli import main"),
        ("duomesh.cli.x", "def f():\n    import torch"),
        ("duomesh.cli.env", "import torch"),
        ("duomesh.stray", "import numpy"),
    ],
)
def test_wrong_imports_are_found(module: str, source: str) -> None:
    assert len(import_faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("duomesh.core.x", "import json, numpy as np\nfrom ml_dtypes import bfloat16\nfrom .spec import model"),
        ("duomesh.core.x", "def f():\n    import jinja2"),
        ("duomesh.core.x", "if TYPE_CHECKING:\n    from rich.progress import Progress"),
        ("duomesh.backends.torch.x", "import torch.nn\nfrom duomesh.kernels.reference import OPS\nfrom . import ops"),
        ("duomesh.converters.hf.oracle", "def f():\n    import torch, transformers"),
        ("duomesh.api", "def f():\n    from duomesh.backends.jax.session import JaxSession"),
        ("duomesh.sides", "from duomesh.api import build\nfrom duomesh.converters.hf.oracle import HfOracle"),
        ("duomesh", "from duomesh import spec\nfrom duomesh.api import Model"),
        ("duomesh.cli.main", "import importlib\nimportlib.import_module(name)"),
        ("duomesh.cli.x", "from duomesh import __version__\nimport duomesh\nfrom duomesh.sides import verify"),
    ],
)
def test_right_imports_pass(module: str, source: str) -> None:
    assert import_faults(source, module) == []


def run_python(source: str) -> list[object]:
    """What a fresh interpreter prints, one JSON value a line."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(source)], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_importing_the_library_loads_no_framework() -> None:
    """Neither the package nor, short of running something, any module outside of the backends."""
    quiet = [module_of(path)[0] for path in LIBRARY]
    quiet = [name for name in quiet if not name.startswith("duomesh.backends.")]
    first, rest = run_python(f"""
        import importlib, json, sys
        heavy = ("torch", "jax", "transformers", "tokenizers", "triton", "rich", "tyro", "jinja2")
        def loaded(): print(json.dumps([name for name in heavy if name in sys.modules]))
        import duomesh
        loaded()
        for name in {quiet!r}:
            importlib.import_module(name)
        loaded()
    """)
    assert first == []
    assert rest == ["rich", "tyro"]  # the command line's own


@pytest.mark.parametrize(("present", "absent"), [("jax", ["torch"]), ("torch", ["jax", "flax", "optax"])])
def test_one_framework_is_enough(present: str, absent: list[str]) -> None:
    """With the other one not installed: the library runs, and says what is missing and how to get it."""
    shape, message, code, error, env = run_python(f"""
        import contextlib, io, json, os, sys
        os.environ["JAX_PLATFORMS"] = "cpu"

        class Without:
            "A finder that does not see some packages, as if they were not installed."
            def __init__(self, finder): self._finder = finder
            def __getattr__(self, name): return getattr(self._finder, name)
            def find_spec(self, name, path=None, target=None):
                return None if name.partition(".")[0] in {absent!r} else self._finder.find_spec(name, path, target)
        sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

        import numpy as np
        import duomesh as dm
        from duomesh.cli.main import main
        model = dm.build("tiny-mistral", backend={present!r}, device="cpu")
        print(json.dumps(model.logits(np.arange(6, dtype=np.int32).reshape(1, 6)).shape))
        try:
            dm.build("tiny-mistral", backend={absent[0]!r})
        except dm.DuomeshError as error:
            print(json.dumps(f"{{type(error).__name__}}: {{error}}"))
        with contextlib.redirect_stderr(io.StringIO()) as heard:
            code = main(["verify", "tiny-mistral", {absent[0]!r}, {present!r}])
        print(json.dumps(code))
        print(json.dumps(heard.getvalue()))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            main(["env"])
        print(json.dumps(said.getvalue()))
    """)
    sentence = (
        f"the {absent[0]} backend needs the package '{absent[0]}'. Install it with: pip install 'duomesh[{absent[0]}]'."
    )
    assert shape == [1, 6, 520]
    assert message == f"BackendError: {sentence}"
    assert (code, error) == (2, f"duomesh verify: {sentence}\n")
    assert f"not installed: pip install 'duomesh[{absent[0]}]'" in str(env)
    assert "works on" in str(env)


# Sizes

MODULE_LINES, FUNCTION_LINES = 600, 60


def test_modules_and_functions_are_short() -> None:
    faults = []
    for path in ALL:
        text = path.read_text("utf-8")
        length = len(text.splitlines())
        faults += [f"{name_of(path)} has {length} lines"] if length > MODULE_LINES else []
        faults += [f"{name_of(path)}: {fault}" for fault in long_functions(text, FUNCTION_LINES)]
    assert not faults, "\n".join(faults)


def test_long_functions_are_found() -> None:
    body = "    x = 1\n" * 4
    assert long_functions(f"def f():\n{body}", 5) == []
    assert long_functions(f"def f():\n{body}    y = 2\n", 5) == ["f has 6 lines (line 1)"]
    assert long_functions(f'def f():\n    """One.\n\n    Two.\n    """\n{body}', 5) == []
    inner = "class A:\n    async def g(self):\n        def h():\n" + "            x = 1\n" * 6
    assert long_functions(inner, 6) == ["g has 8 lines (line 2)", "h has 7 lines (line 3)"]


# Names


def known_architectures() -> tuple[str, ...]:
    """Stems of every preset and converter family, and of families to come."""
    from duomesh.converters.hf.families import FAMILIES
    from duomesh.spec import preset_names

    ours = {name.split("-")[-1 if name.startswith(("tiny-", "demo-")) else 0] for name in (*FAMILIES, *preset_names())}
    stems = {name.rstrip("0123456789.") for name in ours}
    others = "bloom deepseek falcon gemma glm gpt granite kimi mamba minimax mixtral moonshot nemotron olmo opt phi yi"
    return tuple(sorted(stems | set(others.split())))


def test_backends_and_kernels_name_no_architecture() -> None:
    names = known_architectures()
    assert {"llama", "mistral", "ministral", "qwen", "smollm"} <= set(names)
    paths = [path for path in LIBRARY if path.relative_to(ROOT).parts[1] in ("backends", "kernels")]
    faults = [
        f"{name_of(path)}: {fault}" for path in paths for fault in architecture_names(path.read_text("utf-8"), names)
    ]
    assert len(paths) > 20 and not faults, "\n".join(faults)


def test_architecture_names_are_found() -> None:
    names = known_architectures()
    for text in ("if kind == 'llama':", "# as in Qwen2", "def is_gemma(x): ...", "gpt_oss", "LLaMA 3", "phi3"):
        assert len(architecture_names(text, names)) == 1, text
    for text in ("options = optimizer.opt_in", "philox(counter)", "graphics", "x.yield_()"):
        assert architecture_names(text, ("phi", "yi", "gpt")) == [], text


# Tolerances

# file -> a piece of the source line, and why the number in it is no tolerance on a computed result
ALLOWED_NUMBERS = {
    "test_data.py": {"np.corrcoef": "a correlation over 10,000 places of a shuffle; its standard error is 0.01"},
    "test_hf_export.py": {"> 0.01": "asks that two models differ, and by much more than rounding"},
    "test_report.py": {"abs_tol=0.2": "pixels of a chart, which are written with one digit"},
}


def test_tests_hold_no_literal_tolerance() -> None:
    faults, unused = [], {(file, piece) for file, pieces in ALLOWED_NUMBERS.items() for piece in pieces}
    for path in TESTS:
        text = path.read_text("utf-8")
        lines = text.splitlines()
        for fault in literal_tolerances(text):
            line = lines[int(fault.rsplit("(line ", 1)[1].rstrip(")")) - 1]
            used = {(path.name, piece) for piece in ALLOWED_NUMBERS.get(path.name, {}) if piece in line}
            unused -= used
            faults += [] if used else [f"{name_of(path)}: {fault}"]
    assert not faults, "\n".join(faults)
    assert not unused, f"allowed but not there any more: {unused}"


@pytest.mark.parametrize(
    "source",
    [
        "assert error < 1e-5",
        "assert 0.001 >= abs(a - b)",
        "assert abs(a - b) <= 1e-6 * abs(b)",
        "assert e <= max(1e-7, own)",
        "assert e <= (1e-3 if low else bound('value', d))",
        "assert e <= 10 * bound('value', 'float32')",
        "assert e < core.bounds.bound('loss', d) * 2.0",
        "assert a == pytest.approx(b)",
        "assert a == pytest.approx(b, rel=1e-6)",
        "np.testing.assert_allclose(a, b)",
        "np.testing.assert_allclose(a, b, rtol=2 * 1e-3)",
        "torch.testing.assert_close(a, b, rtol=0, atol=1e-4)",
        "assert torch.allclose(a, b)",
        "assert math.isclose(a, b, abs_tol=0.5)",
        "np.testing.assert_almost_equal(a, b)",
        "self.assertAlmostEqual(a, b, places=3)",
    ],
)
def test_literal_tolerances_are_found(source: str) -> None:
    assert len(literal_tolerances(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "assert error <= bound('value', 'float64')",
        "assert abs(a - b) <= bound('loss', d) * abs(b)",
        "assert relative_error(run(lr=1e-3), b) <= bound('value', d, own_error=e)",
        "np.testing.assert_allclose(a, b, rtol=bound('value', d), atol=0)",
        "assert a == pytest.approx(b, abs=0, rel=rounding(3))",
        "assert np.abs(x).max() < 6.4 and seconds < 5 and count > 0",
        "assert learning_rate == 1e-3",
    ],
)
def test_bounds_pass(source: str) -> None:
    assert literal_tolerances(source) == []


# Environment variables, pickles, skips

ALLOWED_ENVIRONMENT: dict[str, str] = {}  # file -> why it may read environment variables


def test_the_library_reads_no_environment_variable_and_no_pickle() -> None:
    faults = []
    for path in LIBRARY:
        text, name = path.read_text("utf-8"), name_of(path)
        found = pickles(text) + ([] if name in ALLOWED_ENVIRONMENT else environment_reads(text))
        faults += [f"{name}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source", ["os.environ['X']", "x = os.getenv('X')", "os.environ.get('X')", "from os import environ, path"]
)
def test_environment_reads_are_found(source: str) -> None:
    assert len(environment_reads(source)) == 1
    assert environment_reads("jinja2.Environment(); os.environment; self.environ") == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy, dill",
        "state = torch.load(path, weights_only=True)",
        "np.load(path)",
        "read = torch.load",
        "def f():\n    import marshal",
    ],
)
def test_pickles_are_found(source: str) -> None:
    assert len(pickles(source)) == 1
    assert pickles("json.load(file); model.load(path); torch.tensor(1); pickles = 3") == []


def test_skips_have_reasons() -> None:
    faults = [f"{name_of(path)}: {fault}" for path in TESTS for fault in unexplained_skips(path.read_text("utf-8"))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.skip\ndef f(): ...",
        "@pytest.mark.skip()\ndef f(): ...",
        "@pytest.mark.skipif(not GPU)\ndef f(): ...",
        "@pytest.mark.skipif(not GPU, reason='')\ndef f(): ...",
        "@pytest.mark.xfail\ndef f(): ...",
        "@pytest.mark.xfail(strict=True)\ndef f(): ...",
        "pytest.skip()",
        "pytest.skip('')",
        "jax = pytest.importorskip('jax')",
        "marks = [pytest.mark.skip]",
    ],
)
def test_unexplained_skips_are_found(source: str) -> None:
    assert len(unexplained_skips(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.skip(reason='why')\ndef f(): ...",
        "@pytest.mark.skip('why')\ndef f(): ...",
        "@pytest.mark.skipif(not GPU, reason='needs a GPU')\ndef f(): ...",
        "pytest.skip(f'needs {name}')",
        "pytest.importorskip('triton', reason='needs triton')",
        "@pytest.mark.slow\ndef f(): ...",
    ],
)
def test_explained_skips_pass(source: str) -> None:
    assert unexplained_skips(source) == []
