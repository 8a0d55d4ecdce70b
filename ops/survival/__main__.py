from ops.survival.cli import main

raise SystemExit(main())
