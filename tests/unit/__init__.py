"""Tests of text, tables and records: no compiler."""
