import sys

from sinklab.cli.main import main

sys.exit(main())
