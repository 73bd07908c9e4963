#!lua flags=allow-oom
-- ARGV: created_us, fence, holder.
local head = read_head()
if head and holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then
  write_head(head, {holder = '', lease_us = '0'})
end
return {'ok'}
