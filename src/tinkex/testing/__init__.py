"""Tools for testing programs that use tinkex: a fake server, a fake clock, scripted faults.

See `tinkex.testing.fake_server` for the server, `tinkex.testing.faults` for the effects and
`tinkex.testing.plugin` for the pytest fixtures that come with the package. Names are loaded when
they are first used: pytest loads the plugin in every run, also where no server can be installed.
"""

from tinkex.lazy_imports import import_lazily

__getattr__, __dir__ = import_lazily(__name__)
