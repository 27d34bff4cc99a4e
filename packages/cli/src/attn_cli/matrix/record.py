"""The matrix as JSON-safe values."""

from __future__ import annotations

from typing import Any

from attn_cli.matrix.merging import Column, columns, place
from attn_cli.matrix.questions import PLAIN, Question
from attn_cli.matrix.survey import AskedDevice, BackendFacts, Matrix
from attn_cli.schema import SCHEMA_VERSION
from attn_shared.request import AttentionRequest

__all__ = ["matrix_record"]


def matrix_record(matrix: Matrix) -> dict[str, Any]:
    """Return the matrix as JSON-safe values.

    The devices on which a backend answers alike are one column. A column that refuses the device
    has no cells: its own answer is the answer to every question. A question's `asks` are the
    fields that the first of its ways changes in the plain request.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "plain_request": PLAIN.to_dict(),
        "questions": [_question_record(question) for question in matrix.questions],
        "devices": [_device_record(device) for device in matrix.devices],
        "backends": [_backend_record(matrix, backend) for backend in matrix.backends],
        "hardware_runs": [run.to_dict() for run in matrix.runs],
        "not_provided": [
            {
                "name": name,
                "family": known.family,
                "vendors": [str(vendor) for vendor in known.vendors],
                "description": known.kernels,
                "is_planned": known.is_planned,
            }
            for name, known in matrix.not_provided.items()
        ],
    }


def _question_record(question: Question) -> dict[str, Any]:
    return {
        "key": question.key,
        "topic": str(question.topic),
        "axis": question.axis,
        "value": question.value,
        "label": question.label,
        "asks": _differences(PLAIN.with_options(**question.ways[0]), PLAIN),
    }


def _differences(request: AttentionRequest, other: AttentionRequest) -> dict[str, Any]:
    theirs = other.to_dict()
    return {field: value for field, value in request.to_dict().items() if value != theirs[field]}


def _device_record(device: AskedDevice) -> dict[str, Any]:
    facts = device.facts
    return {
        "name": device.name,
        "device": facts.name,
        "vendor": str(facts.vendor),
        "family": facts.arch_family,
        "arch": facts.arch,
        "is_simulated": facts.is_simulated,
    }


def _backend_record(matrix: Matrix, backend: BackendFacts) -> dict[str, Any]:
    return {
        "name": backend.name,
        "provided_by": backend.provided_by,
        "description": backend.description,
        "graph_level": backend.graph_level or None,
        "problem": backend.problem or None,
        "columns": [
            _column_record(column, matrix) for column in columns(matrix.sheets[backend.name])
        ],
    }


def _column_record(column: Column, matrix: Matrix) -> dict[str, Any]:
    sheet = column.sheet
    return {
        "place": place(column.devices, matrix.devices),
        "devices": [device.name for device in column.devices],
        **sheet.base.to_dict(),
        "run_on_hardware": sheet.is_run,
        "plain_request": _differences(sheet.plain, PLAIN),
        "preferred": sheet.preferred or None,
        "rules": list(sheet.rules),
        "cells": {}
        if sheet.base.refuses_device
        else {key: cell.to_dict() for key, cell in sheet.cells.items()},
    }
