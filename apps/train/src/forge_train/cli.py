"""The forge-train command."""


def main() -> None:
    print("hello")
