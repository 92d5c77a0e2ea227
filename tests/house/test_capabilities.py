"""The page of capabilities answers every row of the list, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from durable.testing import conformance

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "capabilities.md"
LIST = """
    2 7 13 17 18 19 20 23 29 30 31 32 33 34 39 40 45 46 49 50 60 61 62 63 64 76 77 78 79 80 81 82 83 88 89 90 93 96 97 98 99 100 101 102
    103 104 105 117 118 119 120 121 122 123 124 125 126 131 132 137 138 139 140 141 142 143 145 146 147 148 149 150 152 153 154 155 157
    158 160 161 163 164 165 166 167 168 174 177 178 181 182 189 190 191 192 193 194 195 196 199 200 201 202 203 208 210 211 212 213 214
    215 216 217 218 219 220 221 222 223 224 225 226 227 228 229 230 232 233 234 235 237 238 239 240 241 242 243 244 245 251 252 253 254
    265 266 272 273 274 275
"""
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ((?:`test_\w+`(?:, )?)+) \|$")


def _rows() -> dict[int, str]:
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"^\| \d", line)]
    matches = [ROW.match(line) for line in lines]
    unread = [line for line, match in zip(lines, matches, strict=True) if match is None]
    assert unread == [], "rows that name no test"
    return {int(match[1]): match[4] for match in matches if match is not None}


def test_every_row_of_the_list_is_answered_once() -> None:
    numbers = [int(line.split("|")[1]) for line in PAGE.read_text().splitlines() if re.match(r"^\| \d", line)]
    assert numbers == [int(number) for number in LIST.split()]


def test_each_named_test_exists() -> None:
    known = {
        name
        for folder in (ROOT / "tests", Path(conformance.__file__).parent)  # the suite is where the package is
        for path in folder.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    named = {name for answer in _rows().values() for name in re.findall(r"`(test_\w+)`", answer)}
    assert len(named) > 60
    assert named - known == set()
