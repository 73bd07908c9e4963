#!lua flags=allow-oom
-- ARGV: created_us, fence, holder, turn_id, status ('' to forget the record), result, ttl_us.
local head = read_head()
if not head then return {'not_found'} end
if not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then return {'lease_lost'} end
local now = clock_us()
local turns = read_turns(now)
local turn, position
for at, one in ipairs(turns) do
  if one.id == ARGV[4] then turn, position = one, at end
end
local is_forgotten = ARGV[5] == ''
if not turn or not is_forgotten and turn.status ~= 'running' then return {'ok'} end
local values
if is_forgotten then
  if turn.status == 'running' then redis.call('UNLINK', tail_key) end
  table.remove(turns, position)
else
  values = close_turn(turn, ARGV[5], ARGV[6], now + tonumber(ARGV[7]))
end
write_head(head, write_turns(head, turns, values))
return answer('ok')
