"The processes of the chapter `tools/sleeping_replicas`: its server, and the engines behind it."
import sys

from script import load

main = load("tools/sleeping_replicas")["main"]

if __name__ == "__main__": main(*sys.argv[1:])
