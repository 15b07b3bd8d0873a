"""python -m dlrm.scripts.bert"""

from dlrm.language.command import start

if __name__ == "__main__":
    start()
