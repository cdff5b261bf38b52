"""Markdown that is still growing: the blocks that will not change any more, and the last one."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.syntax import Syntax

CODE_THEME = "ansi_dark"
"""Has no background and takes the terminal's own colours, so it suits dark and light ones."""

_MARGIN_LINES = 2


class MarkdownBlocks:
    """Text that arrives in pieces, as top-level blocks of Markdown.

    A block is done once the next one has begun in a whole line: only then can no text change it any more.
    """

    def __init__(self) -> None:
        # HTML would be rendered as nothing at all, and answers about HTML with it.
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._rest = ""

    def feed(self, piece: str) -> None:
        """Add text."""
        self._rest += piece

    def take_done(self) -> list[RenderableType]:
        """Remove the blocks that are done, in their order."""
        whole = self._rest[: self._rest.rfind("\n") + 1]
        starts = [token.map[0] for token in self._parser.parse(whole) if _is_start(token) and token.map]
        if len(starts) < 2:
            return []
        lines = whole.split("\n")[: starts[-1]]
        done = "".join(f"{line}\n" for line in lines)
        self._rest = self._rest[len(done) :]
        return self._split(done)

    def take_rest(self) -> list[RenderableType]:
        """Remove everything: no text will follow."""
        rest, self._rest = self._rest, ""
        return self._split(rest)

    def show_rest(self) -> list[RenderableType]:
        """What is not done yet; more than one block if the last line may begin another."""
        return self._split(self._rest)

    def _split(self, text: str) -> list[RenderableType]:
        blocks: list[list[Token]] = []
        for token in self._parser.parse(text):
            if _is_start(token):
                blocks.append([])
            blocks[-1].append(token)
        return [_Trimmed(_Block(block)) for block in blocks]


def _is_start(token: Token) -> bool:
    """Whether a top-level block begins with ``token``."""
    return token.level == 0 and token.nesting >= 0 and token.type != "inline"


class Tail:
    """The last lines of what is not done: as many as the terminal can redraw.

    Args:
        blocks: rendered with an empty line between two of them.
        is_continued: whether there is an empty line before them, too.
    """

    def __init__(self, blocks: Sequence[RenderableType], *, is_continued: bool) -> None:
        self._blocks = blocks
        self._is_continued = is_continued

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines: list[list[Segment]] = []
        for block in self._blocks:
            lines += [[]] if lines or self._is_continued else []
            lines += console.render_lines(block, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - _MARGIN_LINES) :]:
            yield from line
            yield Segment.line()


class _Heading(Heading):
    """At the left like everything else, and without a box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Code(CodeBlock):
    """Without empty lines above and below."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 2))


class _Block(Markdown):
    """Tokens that were parsed already."""

    elements = Markdown.elements | {"heading_open": _Heading, "fence": _Code, "code_block": _Code}

    def __init__(self, tokens: list[Token]) -> None:
        # A link shows its target: its text may say anything.
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.parsed = tokens


class _Trimmed:
    """A block without the empty lines around it and the blanks behind its lines."""

    def __init__(self, block: Markdown) -> None:
        self._block = block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_trim(line) for line in console.render_lines(self._block, options, pad=False)]
        filled = [i for i, line in enumerate(lines) if line]
        for line in lines[filled[0] : filled[-1] + 1] if filled else []:
            yield from line
            yield Segment.line()


def _trim(line: list[Segment]) -> list[Segment]:
    """A line without blanks at its end; those of a coloured background are kept."""
    line = [*line]
    while line and not (line[-1].style and line[-1].style.bgcolor):
        last = line.pop()
        if last.text.rstrip():
            return [*line, last._replace(text=last.text.rstrip())]
    return line
