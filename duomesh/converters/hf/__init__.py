"""Hugging Face directories in and out: config.json <-> `ModelSpec`, tensors <-> canonical names, and the oracle."""

from duomesh.converters.hf.config import HfConfig, read_config
from duomesh.converters.hf.config_writer import write_config
from duomesh.converters.hf.oracle import HfOracle
from duomesh.converters.hf.reader import HfCheckpoint
from duomesh.converters.hf.writer import ExportReport, export_hf

__all__ = ["ExportReport", "HfCheckpoint", "HfConfig", "HfOracle", "export_hf", "read_config", "write_config"]
