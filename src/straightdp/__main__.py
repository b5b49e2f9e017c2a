from straightdp.cli import main

raise SystemExit(main())
