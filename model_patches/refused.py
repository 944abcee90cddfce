REFUSED: dict[str, str] = {}
