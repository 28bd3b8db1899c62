"""What is kept of a program's output: its beginning and its end, however long it is."""


class KeptOutput:
    """The beginning and the end of an output."""

    def __init__(self, most: int):
        """`most`: bytes that are kept at either end."""
        self._most = most
        self._head = bytearray()
        self._tail = bytearray()
        self.left_out = 0  # bytes

    def add(self, data: bytes) -> None:
        """Adds output."""
        left = self._most - len(self._head)
        self._head += data[:left]
        self._tail += data[left:]
        beyond = max(0, len(self._tail) - self._most)
        self.left_out += beyond
        del self._tail[:beyond]

    @property
    def content(self) -> bytes:
        """Everything that was kept, and how many bytes were left out."""
        between = b""
        if self.left_out:
            between = f"\n[{self.left_out} bytes are left out]\n".encode()
        return bytes(self._head) + between + bytes(self._tail)

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode("utf-8", "replace")
