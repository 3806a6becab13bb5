"The processes of the chapter `tools/sleeping_replicas`: its server, and the engines behind it."
import sys

from script import load

if __name__ == "__main__": load("tools/sleeping_replicas")["main"](*sys.argv[1:])
