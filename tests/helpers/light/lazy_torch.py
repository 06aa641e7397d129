"""Modules of torch that it or transformers imports and hardly uses, until they are needed: a third of each start.

transformers decorates some functions with torch._dynamo, and optimizers, DDP and accelerate ask it whether something is
compiled. torch.distributed.tensor imports three names of symbolic_shapes, and with it sympy. torch itself imports what
some operators on tensors without values need, and for that most operators in Python; transformers imports DTensor, and
with it what each operator does with one. What stands here answers these as the real modules do where nothing is
compiled or in parts; whoever asks for anything else gets the real ones.
"""

import functools
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

DYNAMO, SHAPES = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
META, OPERATORS = "torch._meta_registrations", ("torch._decomp", "torch._refs")
# Packages of which only modules are needed: PRIMS by generators, RULES by torch.distributed.tensor.
PRIMS, RULES = "torch._prims", "torch.distributed.tensor._ops"
LOSS = "torch.distributed.tensor.parallel.loss"  # It imports most of RULES.
# What transformers needs for masks, which does without the rest.
ALONE = "torch._dynamo._trace_wrapped_higher_order_op"


class Lazy(ModuleType):
    """A module, and the real one once `real` was called."""

    def __init__(self, name, **known):
        super().__init__(name)
        vars(self).update(known)
        self.is_real = False

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self):
        """Imports the real module in the place of this one."""
        name = self.__name__
        if not self.is_real:
            self.is_real = True
            remove(name)
            self.replaced(importlib.import_module(name))
        return sys.modules[name]

    def replaced(self, module):
        """Called once with the real module."""


class Part:
    """A module of torch._dynamo, which answers what is asked of it where nothing is compiled."""

    def __init__(self, owner, name, **known):
        self._owner, self._name, self._known = owner, name, known

    def __getattr__(self, name):
        if not self._owner.is_real and name in self._known:
            return self._known[name]
        return getattr(getattr(self._owner.real(), self._name), name)


class Dynamo(Lazy):
    """torch._dynamo."""

    def __init__(self, path):
        super().__init__(DYNAMO, __path__=path, allowed=[])
        self.eval_frame = Part(self, "eval_frame", OptimizedModule=type("OptimizedModule", (), {}))
        self.utils = Part(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        self.trace_rules = Part(self, "trace_rules", clear_lru_cache=lambda: None)

    def replaced(self, module):
        for function in self.allowed:
            module.allow_in_graph(function)

    def assume_constant_result(self, function):
        function._dynamo_marked_constant = True
        return function

    def allow_in_graph(self, function):
        if self.is_real:
            return self.real().allow_in_graph(function)
        self.allowed.append(function)
        return function

    def graph_break(self, *args, **kwargs):
        if self.is_real:
            self.real().graph_break(*args, **kwargs)

    def disable(self, function=None, recursive=True, **options):
        if function is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if self.is_real or isinstance(function, type):
            return self.real().disable(function, recursive, **options)
        disabled = []

        @functools.wraps(function)
        def call(*args, **kwargs):
            if not self.is_real:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(self.real().disable(function, recursive, **options))
            return disabled[0](*args, **kwargs)

        return call


class Shapes(Lazy):
    """torch.fx.experimental.symbolic_shapes: no shape is symbolic until the real one makes some."""

    def __init__(self):
        super().__init__(SHAPES, GuardOnDataDependentSymNode=type("GuardOnDataDependentSymNode", (RuntimeError,), {}))
        for name in ("guard_or_false", "statically_known_true"):
            setattr(self, name, functools.partial(self.ask, name))
        self.given = {name: value for name, value in vars(self).items() if not name.startswith("_") and value}

    def ask(self, name, value):
        return value if isinstance(value, bool) else getattr(self.real(), name)(value)

    def replaced(self, module):
        """Who has got the names gets the real ones."""
        others = [m for name, m in sys.modules.items() if name.startswith("torch.") and isinstance(m, ModuleType)]
        for other in others:
            for name, value in self.given.items():
                if vars(other).get(name) is value:
                    setattr(other, name, getattr(module, name))


class Meta(Lazy):
    """torch._meta_registrations. The operators in Python, which it imports, become real with it."""

    def __init__(self):
        super().__init__(META)
        for name in OPERATORS:
            place(Operators(name, self))
        importlib.import_module("torch._prims.rng_prims")  # Generators need it.

    def real(self):
        if not self.is_real:
            for name in OPERATORS:
                remove(name)
        return super().real()


class Package(Lazy):
    """PRIMS or RULES: its modules are there, and its own code runs in this object when it is needed."""

    def __init__(self, name, spec):
        super().__init__(name, __path__=list(spec.submodule_search_locations), real_spec=spec)

    def real(self):
        if not self.is_real:
            self.is_real = True
            self.real_spec.loader.exec_module(self)
        return self


def wait_for_parts(api):
    """The first DTensor loads what each operator does with one; `api` defines it."""
    new = api.DTensor.__new__

    def make(cls, *args, **kwargs):
        api.DTensor.__new__ = new
        sys.modules[RULES].real()
        return new(cls, *args, **kwargs)

    api.DTensor.__new__ = make


class Operators(Lazy):
    """One of OPERATORS."""

    def __init__(self, name, meta):
        super().__init__(name, __path__=[], meta=meta)
        if name == "torch._decomp":
            self.decomposition_table = Table(self)  # torch.distributed.tensor imports it.

    def real(self):
        self.meta.real()
        return sys.modules[self.__name__]


class Table:
    """The table of the module `owner`."""

    def __init__(self, owner):
        self.owner = owner

    def __contains__(self, operator):
        return operator in self.owner.real().decomposition_table

    def __getitem__(self, operator):
        return self.owner.real().decomposition_table[operator]


def place(module):
    parent, _, own = module.__name__.rpartition(".")
    sys.modules[module.__name__] = module
    setattr(sys.modules[parent], own, module)


def remove(name):
    parent, _, own = name.rpartition(".")
    del sys.modules[name]
    vars(sys.modules[parent]).pop(own, None)


class There:
    """Loads a module that is there."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec or module.__spec__


def find(fullname, find_spec):
    """The spec of a module that stands in for one of torch; None where `find_spec()` finds the right one."""
    if fullname in (PRIMS, RULES):
        return ModuleSpec(fullname, There(first(Package(fullname, find_spec()))), is_package=True)
    if fullname == LOSS and LOSS not in tried:
        loss = first(Lazy(LOSS))
        loss.loss_parallel = lambda: loss.real().loss_parallel()
        return ModuleSpec(LOSS, There(loss))
    if fullname.startswith(f"{RULES}.") and fullname.endswith("_ops") and isinstance(sys.modules.get(PRIMS), Package):
        Package.real(sys.modules[PRIMS])  # It has an operator of this name.
    if fullname in (SHAPES, META):
        return (
            None
            if fullname in tried
            else ModuleSpec(fullname, There(first(Shapes() if fullname == SHAPES else Meta())))
        )
    if fullname.startswith(OPERATORS) and isinstance(stands := sys.modules.get(META), Meta):
        stands.real()
        module = sys.modules.get(fullname)
        return ModuleSpec(fullname, There(module)) if module else importlib.util.find_spec(fullname)
    if not fullname.startswith(DYNAMO) or fullname == ALONE:
        return None
    if fullname == DYNAMO:
        spec = None if DYNAMO in tried else find_spec()
        path = spec and list(spec.submodule_search_locations)
        return path and ModuleSpec(fullname, There(first(Dynamo(path))), is_package=True)
    stands = sys.modules.get(DYNAMO)
    if isinstance(stands, Dynamo):
        stands.real()
        if fullname in sys.modules:
            return ModuleSpec(fullname, There(sys.modules[fullname]))
    return None


tried = set()


def first(module):
    """The first import of a module is that of its stand-in."""
    tried.add(module.__name__)
    return module
