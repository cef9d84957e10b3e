"""Names of rows, models or folders that some output format may misread."""

# fmt: off
HOSTILE_NAMES = [
    '[bold]', '[/]', 'a[b]', '$', '$x$', '$\\frac$', '1', '<script>alert(1)</script>', '<b', '%', '&',
    '&amp;', '_x', '_', 'a_b', '#', '\\', 'a\\', '{', '}', '"', "'", '`', ',', ',,', '=1+1', ':x:', '~', '^',
    '|', '.', '..', '\x1b[31mred', '\x1b]0;title\x07', '\x9b31m', 'x\ny', 'x\ry', 'x\ty', '\x00', '\x7f',
    '\u202e', '\u2028', '\ud800', 'ü', '日本', '-rf', '--x', '../x', '/x', 'a/b', 'a%2Fb', '50%', 'x' * 300,
    '日' * 120, '*', '*x', '?', '`id`', '$(id)', 'two words', ';', '!', 'a:b',
    'a\u200bb', '\ufeffx', 'x\u200ey', 'a\xadb', '\u2060', 'a\\|b', '&#124;', '\\<b>',
]
# fmt: on


def escape_name(name: object) -> str:
    """Escape the characters of a name that cannot be printed."""
    return ''.join(
        character if character.isprintable() else character.encode('unicode_escape').decode()
        for character in str(name)
    )
