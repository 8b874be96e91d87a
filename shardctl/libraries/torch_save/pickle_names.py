"""Lists the names that a pickle must not mention: those that run code, and indirect ways to them."""

from __future__ import annotations

from typing import Final


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DANGEROUS_MODULES: Final = _split_words("""
    _aix_support _ctypes _osx_support _posixshmem _posixsubprocess _pyrepl _socket _winapi aiohttp asyncio bdb cProfile
    cloudpickle codeop commands concurrent ctypes dill distutils doctest ensurepip fileinput ftplib idlelib imaplib imp
    importlib inspect joblib lib2to3 marshal msvcrt multiprocessing nt ntpath os os2 pdb pip pkgutil poplib popen2 posix
    posixpath pty pydoc pyximport runpy setuptools shelve shutil smtplib socket socketserver sqlite3 ssl subprocess sys
    tempfile telnetlib threading timeit urllib urllib2 venv webbrowser winreg xmlrpc zipimport
""")
"""Top-level modules of which no checkpoint has a use, and attackers have; Python 2 spellings included."""

_DANGEROUS_BUILTINS: Final = _split_words("""
    apply breakpoint compile delattr eval exec execfile exit file globals help input locals open quit raw_input reload
    setattr vars
""")
"""What runs or reaches code in `builtins`; `getattr` is not here (see `is_getattr`), `__import__` is in
`_DANGEROUS_ATTRIBUTES`."""

_DANGEROUS_PATHS: Final = _split_words("""
    _codecs.lookup _io.FileIO _io.open _pickle.Unpickler _pickle.load _pickle.loads cPickle.load cPickle.loads
    code.InteractiveConsole code.InteractiveInterpreter code.interact codecs.lookup codecs.open
    copyreg.add_extension copyreg.pickle http.client http.server io.FileIO io.open numpy.f2py numpy.load
    numpy.testing operator.attrgetter operator.methodcaller pandas.eval pandas.read_pickle pickle.Unpickler
    pickle.load pickle.loads platform.popen profile.Profile profile.run profile.runctx requests.api test.support
    torch._dynamo.guards torch._inductor torch.distributed.rpc torch.fx torch.hub torch.jit torch.load torch.ops
    torch.package torch.serialization.load torch.storage._load_from_bytes torch.utils._config_module
    torch.utils.bottleneck torch.utils.collect_env torch.utils.cpp_extension torch.utils.data.datapipes trace.Trace
    types.CodeType types.FunctionType uuid._get_command_stdout
""")
"""Dotted prefixes that load or run code from elsewhere; the lists of picklescan were a start."""

_DANGEROUS_ATTRIBUTES: Final = _split_words("""
    __base__ __bases__ __builtins__ __call__ __class__ __closure__ __code__ __dict__ __func__ __getattr__
    __getattribute__ __globals__ __import__ __init_subclass__ __loader__ __mro__ __reduce__ __reduce_ex__ __self__
    __spec__ __subclasses__ __wrapped__ builtins ctypes eval exec importlib nt os popen posix pty runpy shutil socket
    subprocess sys system
""")
"""Attributes that nothing in a checkpoint has, and every attack by way of an innocent module goes through."""

_BUILTIN_MODULES: Final = frozenset({"builtins", "__builtin__", "__builtins__"})


def can_execute_code(module: str, name: str) -> bool:
    """Return whether a reference to `name` (perhaps dotted) of `module` runs code or reaches for what does.

    >>> (can_execute_code("posix", "system"), can_execute_code("__builtin__", "eval"),
    ...  can_execute_code("torch.serialization", "os.system"))
    (True, True, True)
    >>> (can_execute_code("collections", "OrderedDict"), can_execute_code("builtins", "set"),
    ...  can_execute_code("builtins", "getattr"))
    (False, False, False)
    """
    top, parts = module.split(".", 1)[0], name.split(".")
    if top in _DANGEROUS_MODULES or not _DANGEROUS_ATTRIBUTES.isdisjoint(parts):
        return True
    if top in _BUILTIN_MODULES and not _DANGEROUS_BUILTINS.isdisjoint(parts):
        return True
    path = [*module.split("."), *parts][:8]  # the longest of _PATHS is shorter
    return any(".".join(path[:end]) in _DANGEROUS_PATHS for end in range(2, len(path) + 1))


_HARMLESS_MODULES: Final = _split_words("""
    _codecs argparse collections copy_reg copyreg datetime decimal enum fractions numpy pathlib torch._tensor
    torch._utils torch.cuda torch.distributed torch.nn.parameter torch.serialization torch.storage types uuid
""")
"""Modules whose names make values and nothing else; those of them that run code are in `_DANGEROUS_PATHS`."""
_HARMLESS_PATHS: Final = _split_words("""
    _io.BytesIO deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler deepspeed.runtime.fp16.loss_scaler.LossScaler
    deepspeed.runtime.zero.config.ZeroStageEnum deepspeed.utils.tensor_fragment.fragment_address io.BytesIO
    megatron.core.enums.ModelType megatron.core.transformer.enums.AttnBackend
""")
"""What trainers save beside the weights, which makes values and nothing else, in modules that do more."""
_HARMLESS_BUILTINS: Final = _split_words("""
    bool bytearray bytes complex dict float frozenset getattr int list object range set slice str tuple
""")


def is_harmless(module: str, name: str) -> bool:
    """Return whether this is a name that honest checkpoints have, and that only makes values; what executes apart.

    >>> is_harmless("torch._utils", "_rebuild_tensor_v2"), is_harmless("mine.models", "Net")
    (True, False)
    """
    if module in _BUILTIN_MODULES:
        return name in _HARMLESS_BUILTINS
    if f"{module}.{name}" in _HARMLESS_PATHS:
        return True
    path = module.split(".")
    return module == "torch" or any(".".join(path[:end]) in _HARMLESS_MODULES for end in (1, 2, 3))


def can_reach_code(attribute: str) -> bool:
    """Return whether fetching the (perhaps dotted) `attribute` of an innocent object is a step towards running code.

    >>> can_reach_code("__globals__"), can_reach_code("a.system"), can_reach_code("_local_tensor")
    (True, True, False)
    """
    return not _DANGEROUS_ATTRIBUTES.isdisjoint(attribute.split("."))


def is_getattr(module: str, name: str) -> bool:
    """Return whether this is `getattr`, which pickled enums and nested classes use, and so do attackers."""
    return name == "getattr" and module in _BUILTIN_MODULES
