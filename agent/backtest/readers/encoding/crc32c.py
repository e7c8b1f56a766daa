"""CRC-32C (Castagnoli), masked as TFRecord files store it."""

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_entry(byte) for byte in range(256))


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of a few bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
