"""Horovod's names, served by ``fusedpg.hvd``: `install` puts other modules in this one's place."""

from fusedpg.hvd import install

install()
