"""Patches land, are verified and are undone, on small libraries that each test writes to disk."""

import builtins
import functools
import importlib
import itertools
import sys
import textwrap

import pytest

from unsloth_multigpu import versions
from unsloth_multigpu.errors import PatchError, VersionError
from unsloth_multigpu.patching import Patch, PatchRegistry

SOURCE = '''
def function(x, scale=1):
    """Doc."""
    return x * scale


class Call:
    def __call__(self, x):
        return x


class Base:
    def inherited(self, x):
        return ("inherited", x)


class Thing(Base):
    def method(self, x, scale=1):
        return ("method", x * scale)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def build(cls, x):
        return (cls.__name__, x)

    @property
    def size(self):
        return 1

    gets_no_self = Call()

    class Inner:
        def deep(self):
            return "deep"
'''

_numbers = itertools.count()


@pytest.fixture
def installed(monkeypatch):
    """What the metadata says; a test changes it."""
    fake = {"lib": "1.2"}
    monkeypatch.setattr(versions, "installed_version", fake.get)
    return fake


@pytest.fixture
def write(tmp_path, monkeypatch, installed):
    """Writes a package with one module `core`, returns the name of that module, which no other test has used."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(source=SOURCE):
        package = tmp_path / f"stub_library_{next(_numbers)}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "core.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return f"{package.name}.core"

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("stub_library_"):
            del sys.modules[name]


@pytest.fixture
def module(write):
    return importlib.import_module(write())


def tag(original, *args, **kwargs):
    """The replacement of all tests: says that it was called."""
    return ("ours", original(*args, **kwargs))


def applied(*targets, **fields):
    given = {"supports": "lib>=1,<2", "wrap": tag, "reason": "test", **fields}
    patches = PatchRegistry([Patch(target, **given) for target in targets])
    patches.apply()
    return patches


def states(patches):
    return list(patches.states().values())


@pytest.mark.parametrize(
    ("path", "call", "plain"),
    [
        ("function", lambda m: m.function(2, scale=3), 6),
        ("Thing.method", lambda m: m.Thing().method(2, scale=3), ("method", 6)),
        ("Thing.static", lambda m: m.Thing.static(1), ("static", 1)),
        ("Thing.static", lambda m: m.Thing().static(1), ("static", 1)),
        ("Thing.build", lambda m: m.Thing.build(1), ("Thing", 1)),
        ("Thing.build", lambda m: type("Sub", (m.Thing,), {}).build(1), ("Sub", 1)),
        ("Thing.inherited", lambda m: m.Thing().inherited(1), ("inherited", 1)),
        ("Thing.Inner.deep", lambda m: m.Thing.Inner().deep(), "deep"),
    ],
)
def test_target_of_each_kind_lands_verifies_and_is_restored(module, path, call, plain):
    holder = functools.reduce(getattr, path.split(".")[:-1], module)
    before = list(vars(holder).items())
    patches = applied(f"{module.__name__}:{path}")
    assert states(patches) == ["landed"]
    assert call(module) == ("ours", plain)
    patches.verify()
    patches.undo()
    assert states(patches) == ["undone"]
    assert call(module) == plain
    after = list(vars(holder).items())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(a is b for (_, a), (_, b) in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("path", "needs", "what"),
    [
        *((path, (), "it is not a function") for path in ("Thing", "Thing.size", "Thing.gets_no_self")),
        *((path, (), "there is no such target") for path in ("gone", "Thing.gone", "Gone.method")),
        ("Thing.method", ("self", "trial"), "it has no parameter trial"),
    ],
)
def test_target_that_is_another_one_raises_and_an_optional_one_may_be_missing(module, path, needs, what):
    with pytest.raises(PatchError, match=rf"{path} in lib 1\.2: {what}"):
        applied(f"{module.__name__}:{path}", needs=needs)
    if what == "there is no such target":
        optional = applied(f"{module.__name__}:{path}", optional=True)
        optional.verify()
        assert states(optional) == ["absent"]


def test_target_not_yet_imported_lands_at_its_import(write):
    name = write()
    patches = applied(f"{name}:function", needs=("x", "scale"))
    assert states(patches) == ["waiting for import"]
    assert name not in sys.modules
    assert name.rpartition(".")[0] not in sys.modules
    patches.verify()
    assert importlib.import_module(name).function(1) == ("ours", 1)
    assert states(patches) == ["landed"]
    patches.verify()


def test_target_that_another_module_replaces_lands_after_that_import(write):
    home, other = write(), write("VALUE = 1\n")
    source = f"""
    import {home} as home
    class Thing(home.Thing):
        def method(self, x, scale=1):
            return "replaced"
    home.Thing = Thing
    """
    replacing = write(source)
    patches = applied(f"{home}:Thing.method", f"{other}:Gone.__init__", after=replacing, optional=True)
    module, _ = importlib.import_module(home), importlib.import_module(other)
    patches.verify()
    assert (states(patches), module.Thing().method(2)) == (["waiting for import"] * 2, ("method", 2))
    importlib.import_module(replacing)
    assert states(patches) == ["landed", "absent"]
    assert module.Thing().method(2) == ("ours", "replaced")
    patches.verify()
    patches.undo()
    assert module.Thing().method(2) == "replaced"


def test_version_outside_the_range_raises_and_touches_nothing(module, installed):
    installed["other"] = "0.9"
    patches = PatchRegistry(
        [
            Patch(f"{module.__name__}:function", "lib>=1,<2", tag, "first"),
            Patch(f"{module.__name__}:Thing.method", "other>=1,<3", tag, "second"),
        ]
    )
    with pytest.raises(VersionError, match=r"other 0\.9 is installed.*<3,>=1"):
        patches.apply()
    assert module.function(1) == 1


def test_distribution_that_is_absent_leaves_the_patch_out(installed):
    patches = applied("no_such_library.core:function", supports="no-such-library>=1")
    patches.verify()
    patches.undo()
    assert states(patches) == ["not installed"]


def test_failing_patch_makes_every_import_of_the_module_raise_until_it_is_undone(write):
    name = write()
    patches = applied(f"{name}:function", f"{name}:gone")
    for _ in range(3):
        with pytest.raises(PatchError, match=r"gone in lib 1\.2: there is no such target"):
            importlib.import_module(name)
        assert name not in sys.modules
        assert states(patches) == ["waiting for import"] * 2
    patches.undo()
    assert states(patches) == ["undone"] * 2
    assert importlib.import_module(name).function(1) == 1


def test_failing_patch_leaves_none_of_its_module_on_and_other_modules_patched(write, monkeypatch):
    half_made = []
    monkeypatch.setattr(builtins, "stub_callback", lambda name: half_made.append(sys.modules[name]), raising=False)
    good, bad = write(), write(f"{SOURCE}\nimport builtins\nbuiltins.stub_callback(__name__)\n")
    patches = applied(f"{good}:function", f"{bad}:function", f"{bad}:Thing.static", f"{bad}:gone")
    importlib.import_module(good)
    with pytest.raises(PatchError):
        importlib.import_module(bad)
    assert states(patches) == ["landed"] + ["waiting for import"] * 3
    assert (half_made[0].function(1), half_made[0].Thing.static(1)) == (1, ("static", 1))
    assert not hasattr(half_made[0].function, "__wrapped__")
    assert importlib.import_module(good).function(1) == ("ours", 1)
    patches.verify()


def test_verify_accepts_a_closure_over_ours_without_a_word(module):
    patches = applied(f"{module.__name__}:Thing.method")
    found = module.Thing.method
    module.Thing.method = lambda self, x: (lambda: found(self, x))()
    patches.verify()
    assert module.Thing().method(1) == ("ours", ("method", 1))
    module.kept = found
    module.Thing.method = eval("lambda self, x: kept(self, x)", vars(module))
    with pytest.raises(PatchError, match="was replaced after it was patched"):
        patches.verify()


def test_verify_names_what_replaced_ours(module):
    patches = applied(f"{module.__name__}:Thing.method")
    original = module.Thing.method.__wrapped__

    # Rebuilt from the original, as if from its source: the copied dictionary must not pass for ours.
    @functools.wraps(original)
    def replaced(self, x):
        return x

    module.Thing.method = replaced
    with pytest.raises(PatchError, match=r"Thing\.method was replaced.*Thing\.method \(.*test_patching\.py:\d+\)") as e:
        patches.verify()
    assert e.value.hint


def test_apply_again_over_a_foreign_wrapper_calls_ours_once(module):
    first = applied(f"{module.__name__}:Thing.method")
    found = module.Thing.method

    @functools.wraps(found)  # As Unsloth does.
    def theirs(*args, **kwargs):
        return ("theirs", found(*args, **kwargs))

    module.Thing.method = theirs
    first.undo()
    second = applied(f"{module.__name__}:Thing.method")
    second.verify()
    assert module.Thing().method(1) == ("ours", ("theirs", ("method", 1)))
    second.undo()
    assert module.Thing.method is theirs
