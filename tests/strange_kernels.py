"Kernels that end the process that tries them, and that never end."
import os, time

def crashes(device): os.abort()
def hangs(device): time.sleep(1000)
