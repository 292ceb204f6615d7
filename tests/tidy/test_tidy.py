"""Style as a test: sizes, layers, orphans, and what no file may contain."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sources import ROOT, cpp_functions, files, imports, includes, python_functions, text, tracked

SOURCES = (".py", ".pyi", ".h", ".cc", ".proto", ".sh")


def test_files_are_one_noun() -> None:
    """A file of more than 600 lines holds more than one idea."""
    long = {str(path): text(path).count("\n") for path in files(*SOURCES)}
    assert {path: lines for path, lines in long.items() if lines > 600} == {}


def test_functions_fit_on_a_screen() -> None:
    """A function of 70 lines or more cannot be checked by reading it."""
    functions = [*python_functions(), *cpp_functions()]
    assert len(functions) > 500  # or the search has gone blind
    assert [f for f in functions if f.length >= 70] == []


def test_the_core_knows_no_python_clock_or_chance() -> None:
    """A core that reads the time or draws numbers could not be replayed."""
    forbidden = re.compile(
        r"pybind11|Python\.h|torch|grpc|cuda|^chrono$|^random$|^ctime$|^time\.h$"
    )
    for path in files(".h", ".cc", under="core/"):
        if not str(path).startswith("core/bindings/"):
            assert [name for name in includes(path) if forbidden.search(name)] == [], path


def test_only_bindings_know_pybind11() -> None:
    """Anything else that includes it would tie the core to Python."""
    users = [path for path in files(".h", ".cc") if any("pybind11" in i for i in includes(path))]
    assert users
    assert {path.parts[:2] for path in users} == {("core", "bindings")}


def test_kernels_share_no_templates_with_the_rest() -> None:
    """An inline function compiled for AVX-512 could be linked into code that runs elsewhere."""
    allowed = {"stdint.h", "string.h", "immintrin.h", "core/cpu/weight_format.h"}
    for path in files(".h", ".cc", under="core/cpu/isa/"):
        others = {name for name in includes(path) if not name.startswith("core/cpu/isa/")}
        assert others <= allowed, path


def test_compiled_kernels_leave_no_shared_symbols() -> None:
    """The same, asked of the object files of the last build."""
    objects = list((ROOT / "build/package/core/CMakeFiles").glob("kvledger_isa_*.dir/cpu/isa/*.o"))
    if not objects or shutil.which("nm") is None:
        pytest.skip("nothing was built in build/package, or nm is missing")
    for path in objects:
        listed = subprocess.run(["nm", "-C", path], check=True, capture_output=True, text=True)
        weak = [line for line in listed.stdout.splitlines() if re.search(r" [VWu] ", line)]
        assert weak == [], path


def test_messages_stay_above() -> None:
    """Below the rpc package, a change of the contract must not be felt."""
    above = ("service/kvledger/rpc/", "service/kvledger/cli/")
    at_the_door = {"service/kvledger/server.py", "service/kvledger/limits.py"}
    for path in files(".py", under="service/"):
        if str(path).startswith(above) or str(path) in at_the_door:
            continue
        found = [name for name in imports(path) if name.startswith(("kvledger.v1", "grpc"))]
        assert found == [], path


def test_one_module_drives_the_core_engine() -> None:
    """Two drivers of one engine would be two opinions of what runs."""
    users = [
        str(path)
        for path in files(".py", under="service/")
        if re.search(r"_core\.Engine\b|core\.(plan|commit|abandon)\(", text(path))
    ]
    # A simulation has an engine of its own, which no server sees.
    assert set(users) == {"service/kvledger/engine.py", "service/kvledger/simulation/loop.py"}


def test_nothing_that_is_read_can_be_a_program() -> None:
    """A model file or a message from a stranger would run what its sender wrote (S15)."""
    modules = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "ctypes")
    calls = {
        *("eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "np.load"),
        *("numpy.load", "os.system", "os.popen", "importlib.import_module"),
    }
    looked_at = 0
    for path in files(".py", under="service/"):
        if "/v1/" in str(path):
            continue  # written by protoc
        names = {name.split(".")[0] for name in imports(path)}
        assert names.isdisjoint(modules), path
        for node in ast.walk(ast.parse(text(path))):
            if isinstance(node, ast.Call):
                looked_at += 1
                assert ast.unparse(node.func) not in calls, f"{path}:{node.lineno}"
                words = {keyword.arg for keyword in node.keywords}
                assert words.isdisjoint({"shell", "trust_remote_code"}), f"{path}:{node.lineno}"
    assert looked_at > 1000  # or the search has gone blind


def test_layers_do_not_look_up() -> None:
    """The model must not know the server, nor the tokenizer the model."""
    rules = {
        "service/kvledger/models/": ("kvledger.rpc", "kvledger.server", "kvledger.engine"),
        "service/kvledger/ops/": ("kvledger.rpc", "kvledger.server", "kvledger.engine"),
        "service/kvledger/tokenizer/": (
            *("kvledger.rpc", "kvledger.server", "kvledger.engine"),
            *("kvledger.models", "kvledger.ops", "torch"),
        ),
        "service/kvledger/rpc/": ("kvledger.server", "kvledger.cli", "torch"),
    }
    for folder, forbidden in rules.items():
        for path in files(".py", under=folder):
            assert [name for name in imports(path) if name.startswith(forbidden)] == [], path


def test_every_core_header_has_its_test() -> None:
    """A concept without a test of its name is a concept nobody checked."""
    tested = {path.stem for path in files(".cc", under="tests/")}
    aliases = {
        "kernels": "kv_kernels",  # the interface; its implementation is tested
        "eviction_policy": "prefix_index",  # the interface; each policy has its test too
        "packed_weight": "linear",
        "weight_format": "linear",
        "row_kernels": "rows",
        "table": "kv_kernels",  # reached through the kernels
        "vec": "rows",
        "vec_avx512": "rows",
        "vec_avx2": "rows",
        "vec_portable": "rows",
        "bindings": None,  # tested from Python
        "bound_engine": None,
    }
    for path in files(".h", under="core/"):
        name = aliases.get(path.stem, path.stem)
        assert name is None or name in tested, path


def test_every_test_says_what_would_be_wrong() -> None:
    """A test that does not say what it is for cannot be judged when it fails."""
    for path in files(".py", under="tests/"):
        for node in ast.walk(ast.parse(text(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            ):
                body = (ROOT / path).read_text().splitlines()[node.lineno : node.lineno + 12]
                commented = any(line.strip().startswith("#") for line in body)
                assert ast.get_docstring(node) or commented, f"{path}: {node.name}"
    for path in files(".cc", under="tests/"):
        lines = text(path).splitlines()
        for index, line in enumerate(lines):
            if line.startswith("TEST_CASE("):
                near = (lines[index - 1], lines[index + 1])
                assert any(n.lstrip().startswith("//") for n in near), f"{path}:{index + 1}"


def test_no_module_is_an_orphan() -> None:
    """A module that nothing imports is dead, or was forgotten."""
    imported = {name for path in files(".py") for name in imports(path)}
    entries = {"kvledger.__main__", "kvledger"}
    for path in files(".py", under="service/"):
        module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
        users = [name for name in imported if name == module or name.startswith(f"{module}.")]
        assert users or module in entries, path


def test_links_of_the_pages_lead_somewhere() -> None:
    """A reader who follows a link of a page must find the file."""
    for path in files(".md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text(path)):
            assert (ROOT / path.parent / target).exists(), f"{path}: {target}"


def test_commands_of_the_pages_exist() -> None:
    """A command that a page names must be there."""
    makefile = text(Path("Makefile"))
    for path in files(".md"):
        for target in re.findall(r"`make (\w+)", text(path)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path}: make {target}"
        for module in re.findall(r"python -m (bench\.\w+)", text(path)):
            assert (ROOT / (module.replace(".", "/") + ".py")).exists(), f"{path}: {module}"


def test_nothing_of_a_machine_or_of_how_we_work() -> None:
    """Paths of one machine and hosts of registries mean nothing to whoever clones this."""
    forbidden = re.compile(
        r"/(?:w" r"ork|r" r"oot|home/\w+)/|p" r"ypi\.org|python" r"hosted|deb" r"\.debian"
    )
    for path in tracked():
        if path.suffix in (".json", ".binpb", "") and path.name not in ("Makefile", "run"):
            continue
        assert forbidden.search(text(path)) is None, path


def test_no_unfinished_business() -> None:
    """What is left to do belongs where it will be found, not into a comment."""
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    for path in files(*SOURCES, ".txt", ".md"):
        assert marks.search(text(path)) is None, path
