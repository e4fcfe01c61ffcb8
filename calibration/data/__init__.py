"""Calibration data: files to documents to token ids."""
