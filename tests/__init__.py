"""Tests: unit needs nothing, build a compiler, gpu an H200 or H100."""
